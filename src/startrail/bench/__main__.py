"""``python -m startrail.bench``, as torchrun starts it: the same as ``startrail bench``."""

import sys

from startrail.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))

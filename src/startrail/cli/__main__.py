"""``python -m startrail.cli``, as torchrun starts it."""

import sys

from startrail.cli.app import main

sys.exit(main())

"""``python -m startrail``: the command line."""

import sys

from startrail.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m draftquant`: the command line."""

import sys

from .scripts.cli import main

if __name__ == "__main__":
    sys.exit(main())

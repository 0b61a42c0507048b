"""``python -m harmony_lab``: the command line."""

import sys

from harmony_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m hipsim`: see launcher.py."""

import sys

from hipsim.launcher import main

if __name__ == "__main__":
    sys.exit(main())

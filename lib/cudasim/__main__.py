"""`python -m cudasim`: see launcher.py."""

import sys

from cudasim.launcher import main

if __name__ == "__main__":
    sys.exit(main())

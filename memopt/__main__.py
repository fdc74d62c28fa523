"""`python -m memopt`: the same as the command `memopt`."""

from __future__ import annotations

import sys

from memopt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

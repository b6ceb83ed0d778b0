"""`python -m minispec`: the same as the script `minispec`. Everything is in `minispec.cli`."""

from __future__ import annotations

import sys

from minispec.cli import main

if __name__ == "__main__":
    sys.exit(main())

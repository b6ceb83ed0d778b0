"""`python -m minispec.launch_server`: the same as `minispec serve`. Everything is in `minispec.serving.launch`.

Used in notebook 13 (everything on).
"""

from __future__ import annotations

import sys

from minispec.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))

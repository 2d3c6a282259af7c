"""`python -m rallypoint`: the same as the command `rallypoint`."""

from __future__ import annotations

import sys

from rallypoint.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

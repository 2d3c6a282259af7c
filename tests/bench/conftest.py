from __future__ import annotations

import sys
from pathlib import Path

# The bench is no part of what ships; it is imported from the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

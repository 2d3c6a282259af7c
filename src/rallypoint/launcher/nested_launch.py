"""The import that this process does for a call of `launch`, so that a call from inside it is
refused.
"""

from __future__ import annotations

importing = ""
"""Description of that import, "" when none goes on: "mine, to be preloaded". A call of `launch`
from there would start itself again and again."""

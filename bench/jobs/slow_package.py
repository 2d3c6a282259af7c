"""A package that is slow to import, as large ones are: it keeps a processor busy, so that ranks on
few cores wait for each other.
"""

from __future__ import annotations

import time

SECONDS = 5.0  # of processor time: what importing transformers with its dependencies costs

until = time.process_time() + SECONDS
while time.process_time() < until:
    pass
ready = True

"""What everything is compared with: one interpreter that imports torch."""

from __future__ import annotations

import torch
from marks import mark

mark("imported")
assert torch.__version__

"""first_all_reduce.py with an import that takes 5 s of processor time before it."""

from __future__ import annotations

import first_all_reduce
import slow_package

assert slow_package.ready
first_all_reduce.main()

"""Maximum number of ranks on one machine, and each rank's share of it. Loads nothing: `launch` asks
before it does anything else.
"""

from __future__ import annotations

# ranks on one node: far above any node in use, far below what a typing error could ask of a machine
LARGEST_LOCAL_SIZE = 4096


def threads_of_a_rank(cpus: int, local_size: int) -> int:
    """Return the number of threads for the libraries of one of several ranks: its share of the
    processors that this process may use."""
    return max(1, cpus // local_size)

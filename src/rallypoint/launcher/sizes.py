"""Maximum number of ranks on one machine, each rank's share of it, and the longest time that is
waited for. Loads nothing: `launch` asks before it does anything else.
"""

from __future__ import annotations

# ranks on one node: far above any node in use, far below what a typing error could ask of a machine
LARGEST_LOCAL_SIZE = 4096

# seconds that stand for every longer time: the kernel counts the milliseconds of a wait in 31 bits,
# which end after 24 days
LONGEST_WAIT = 2e6


def threads_of_a_rank(cpus: int, local_size: int) -> int:
    """Return the number of threads for the libraries of one of several ranks: its share of the
    processors that this process may use."""
    return max(1, cpus // local_size)

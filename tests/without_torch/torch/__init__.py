"""A stand-in for torch in jobs whose programs use nothing of torch.

Importing torch takes more than a second of processor time, most of what such a job costs. The
template imports this package in its place, by PYTHONPATH; all else of the job is real. It has the
names that the template wraps, and nothing that works: a program that needs torch is run with torch.
"""

from __future__ import annotations

import ctypes

from . import version

__version__ = version.__version__


class Generator:
    """The generator of random numbers, which a forked rank seeds anew."""

    def seed(self) -> int:
        return 0


default_generator = Generator()


def set_num_threads(count: int) -> None:
    """Threads that compute: there are none."""


# C++'s streams exist in a process that has loaded torch, and a rank's end flushes them.
_cpp = ctypes.CDLL("libstdc++.so.6")
_cpp._ZNSt8ios_base4InitC1Ev(ctypes.create_string_buffer(1))  # std::ios_base::Init()

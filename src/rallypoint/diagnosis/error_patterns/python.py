"""Texts of Python, C, their libraries and the system's resolver about a failure."""

from __future__ import annotations

import re

from rallypoint.diagnosis.error_patterns.known_line import line
from rallypoint.diagnosis.pattern import Pattern

_NOT_LOCKED = (
    # InfiniBand; EFA through libfabric
    r"\b(?:ibv_\w{1,40}|[Uu]nable to register memory)\b[^\n]{0,200}Cannot allocate memory"
)
NOT_LOCKED = Pattern(_NOT_LOCKED)
"""Error text of InfiniBand or EFA that could not lock memory: the limit is that of `ulimit -l`."""

CAUSES = {
    "files-exhausted": Pattern(r"Too many open files|\[Errno 2[34]\]|received 0 items of ancdata"),
    "port-in-use": Pattern(
        r"EADDRINUSE|address already in use|errno: 98\b|\[Errno 98\]"
        r"|but another process is utilizing it",
        re.IGNORECASE,
    ),
    "port-forbidden": Pattern(
        r"(?:bind|listen)\b.{0,160}(?:errno: 13\b|EACCES|Permission denied)",
        re.IGNORECASE | re.DOTALL,
    ),
    "host-memory": Pattern(
        rf"^(?s:(?!.*(?:{_NOT_LOCKED}|\bIb failure: )).*?)Cannot allocate memory"
        r"|\[Errno 12\]|std::bad_alloc|^MemoryError$"
        r"|^Unable to allocate [\d.]+ \wi?B for an array"  # NumPy
        r"|\[WinError 1455\]|The paging file is too small",
        re.IGNORECASE,
    ),
    "disk-full": Pattern(
        # the kernel says the same where a user watches more files than allowed
        r"^(?!.*inotify).*?(?:No space left on device|Disk quota exceeded|\[Errno (28|122)\]|\(os error (28|122)\)"
        r"|\[WinError (112|39|1295)\]|There is not enough space on the disk"
        r"|Not enough free space to write \d+ bytes|^\d+ requested and \d+ written$"  # NumPy
        r"|database or disk is full)",  # SQLite
        re.IGNORECASE | re.DOTALL,
    ),
}

NO_FILES = Pattern(
    # a DataLoader that gets no more descriptors from its workers; Trainium's copy of NCCL
    r"Too many open files\. Communication with the workers is no|CCOM WARN .{1,80} : Too many open files"
)
UNRESOLVED = Pattern(
    r"\bhost not found: |Name or service not known|Temporary failure in name resolution"
    r"|nodename nor servname|getaddrinfo failed"
)
HOST = Pattern(r"""\bhost(?:name)? ['"]?(?P<host>[\w-]+(?:\.[\w-]+)+)['"]?[: ]""")
"""The host that a resolver's words name."""

PORT = Pattern(
    r"\bport[:= ]+`?(\d{1,5})\b"  # torch; accelerate quotes the number
    r"|\('[^']*', (\d{1,5})[,)]"  # socket.create_server, asyncio
    # gRPC, uvicorn and others; torch until 2.2 with the errno between
    r"|:(\d{2,5})\b(?=\D*(?:EADDRINUSE|(?:\d\d - )?address already in use))",
    re.IGNORECASE,
)
"""The port that an error about one names."""

MEMORY_WANTED = Pattern(r"you tried to allocate (\d+) bytes|unable to mmap (\d+) bytes")
MEMORY_WANTED_BY_NUMPY = Pattern(r"^Unable to allocate ([\d.]+) ([KMGTPE])iB for an array")
SYMBOL = Pattern(
    r"(?P<library>(?<![^\s:])[^\s:]{0,400}\.so[.\d]{0,40}): undefined symbol: (?P<symbol>\w+)"
)
"""Words of the loader of shared libraries about one that misses a symbol."""

NOT_PICKLED = Pattern(r"[Cc]an't pickle|[Cc]annot pickle|Can't get local object|not picklable")

POOL_BROKEN = Pattern(  # datasets; nnU-Net and batchgenerators
    r"One of the subprocesses has abruptly died during"
    r"|\bbackground workers? (?:is 6 feet under|are no longer alive)"
)
"""Words about a process of a pool that has ended."""

BARE_TYPES = (
    "ConnectionError",
    "ConnectionResetError",
    "ConnectionAbortedError",
    "ConnectionRefusedError",
    "BrokenPipeError",
    "EOFError",
    "IncompleteReadError",
)
OF_WEB = Pattern(r"https?://|HTTPS?Connection|\bon the Hub\b")
"""Words about a connection that went to no rank."""

BARE = Pattern(
    r"Connection (reset|closed|aborted|refused)|Broken pipe|Socket Timeout"
    r"|failed to connect to all addresses",
    re.IGNORECASE,
)
"""Words about a broken connection, which may be one to a peer, or to a database."""

SIGNALS = {
    "Hangup": 1, "Interrupt": 2, "Quit": 3, "Illegal instruction": 4, "Trace/breakpoint trap": 5,
    "Aborted": 6, "Bus error": 7, "Floating point exception": 8, "Killed": 9,
    "User defined signal 1": 10, "Segmentation fault": 11, "User defined signal 2": 12,
    "Broken pipe": 13, "Alarm clock": 14, "Terminated": 15, "CPU time limit exceeded": 24,
    "File size limit exceeded": 25, "Bad system call": 31,
    "Abort": 6, "Illegal hardware instruction": 4, "Trace trap": 5,
    "段错误": 11, "已放弃": 6,
    "access violation": 11, "stack overflow": 11, "divide by zero": 8, "page error": 7,
}  # fmt: skip
"""strsignal(3)'s words for signals, in which shells, Slurm and torch tell how a process ended, then
zsh's, and faulthandler's for Windows' exceptions.
"""

LINES = (
    line(
        "*** SIG",
        r"(?:^|\blogging\.cc:\d+: )\*\*\* (?P<name>SIG\w+) (?:.* )?received (?:by PID (?P<pid>\d+)|at time=)",
        by="the process itself",
        first=True,
    ),
)

GAVE_UP = (
    # the C library
    r"(?:\*\*\* Error in `.{1,200}': )?(?:(?:\w*alloc|malloc_consolidate|free|m\w+_chunk)\(\): "
    r"(?:double free|invalid|corrupted|unaligned|unsorted|mismatching|memory corruption)\b"
    r"|double free or corruption|corrupted (?:size vs|double-linked)|\*\*\* stack smashing)"
    # macOS: in a process that was forked; of Metal; of Objective-C
    r"|objc\[\d+\]: .{1,400}\bCrashing instead\b|.{0,400}:\d+: failed assertion `"
    r"|.{0,100}\*\*\* Terminating app due to uncaught exception '"
    r"|libc\+\+abi(?:\.dylib)?: terminating |LLVM ERROR: "  # LLVM's library of C++, its compilers
    # of Intel's and LLVM's OpenMP, and of Intel's network cards
    r"|(?:OMP: Error #\d+|\S{1,200}): Assertion failure at \S{1,300}\d"
)
"""Beginnings of lines by which a library tells for what it aborts the process."""

NO_EXCEPTION = "terminate called without an active exception"
"""Words of C++ about a thread that still ran when its process left."""

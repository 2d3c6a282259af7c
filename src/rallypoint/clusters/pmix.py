"""Exchange by PMIx, with the library of the launcher's own installation: Open MPI 5."""

from __future__ import annotations

import ctypes
import os
import select
import signal
from collections.abc import Callable, Mapping, Sequence

from rallypoint.clusters.mpi import not_all_came, not_answered
from rallypoint.host import processes, system_calls

ANSWER_TIMEOUT = 10.0
"""Seconds for a step that the launcher's process on this host answers: one takes milliseconds."""

LIBRARY = "libpmix.so.2"
"""Name of the library, from PMIx 2 to 6: a client talks with servers of other versions."""

KEY = b"rallypoint"

# pmix_common.h, the same in all versions with this name
_GLOBAL, _STRING, _ALL = 3, 3, 0xFFFFFFFE


class _Proc(ctypes.Structure):
    """The library's pmix_proc_t."""

    _fields_ = [("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]


class _Value(ctypes.Structure):
    """The library's pmix_value_t, with room for a larger one."""

    _fields_ = [
        ("type", ctypes.c_uint16),
        ("string", ctypes.c_char_p),
        ("rest", ctypes.c_char * 64),
    ]


def share(environ: Mapping[str, str], text: str, timeout: float) -> str:
    """Return, on every node, the text that node 0 has given; the others give "".

    All tasks must come within `timeout` seconds. Raises EnvironmentProblem `join-timeout` when one
    does not, UsageError `cluster-unclear` when the library or the launcher is not to be talked
    with. A child does it: the library starts threads, and a launcher that forks must have none.
    """
    reading, writing = os.pipe()
    parent = os.getpid()

    def visit() -> None:
        processes.die_with(parent)
        _talk(environ, text, lambda *words: os.write(writing, "\t".join(words).encode() + b"\n"))

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, the kernel would reap the child
    child = processes.in_child(visit)
    os.close(writing)
    pidfd = system_calls.pidfd_open(child)
    try:
        return _follow(reading, timeout)
    finally:
        processes.send(pidfd, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(pidfd)
        os.close(reading)


def _follow(reading: int, timeout: float) -> str:
    """Return the text that the child gets: each of its steps has a deadline."""
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    step, rest = "loading the library", b""
    while True:
        patience = timeout if step == "PMIx_Fence" else ANSWER_TIMEOUT
        if not poll.poll(patience * 1000):
            if step == "PMIx_Fence":
                raise not_all_came(patience)
            raise not_answered(f"{step} took longer than {patience:g} s")
        got = os.read(reading, 1 << 16)
        if not got:
            raise not_answered(f"{step} has ended the process that called it")
        *lines, rest = (rest + got).split(b"\n")
        for line in lines:
            kind, word = line.decode().split("\t")
            if kind == "text":
                return word
            if kind == "failed":
                raise not_answered(f"{step} failed", word)
            step = word


def _talk(environ: Mapping[str, str], text: str, tell: Callable[..., object]) -> None:
    """Exchange the text, and tell each step before it is done."""

    def call(name: str, *arguments: object) -> None:
        tell("step", name)
        status = getattr(library, name)(*arguments)
        if status != 0:
            library.PMIx_Error_string.restype = library.PMIx_Get_version.restype = ctypes.c_char_p
            why = f"{library.PMIx_Error_string(status).decode()} ({status})"
            raise _Failed(f"{why}; {_versions(library, environ)}")

    try:
        library = _load(_candidates(environ))
        me = _Proc()
        call("PMIx_Init", ctypes.byref(me), None, ctypes.c_size_t(0))
        own = environ.get("PMIX_NAMESPACE", "")
        if me.namespace.decode() != own:  # the library found no server, and is alone
            raise _Failed(f"this process is in {me.namespace.decode()!r}, and not in {own!r}")
        if text:
            value = _Value(_STRING, text.encode())
            call("PMIx_Put", ctypes.c_uint8(_GLOBAL), KEY, ctypes.byref(value))
            call("PMIx_Commit")
        everybody, first = _Proc(me.namespace, _ALL), _Proc(me.namespace, 0)
        call("PMIx_Fence", ctypes.byref(everybody), ctypes.c_size_t(1), None, ctypes.c_size_t(0))
        found = ctypes.POINTER(_Value)()
        got = (ctypes.byref(first), KEY, None, ctypes.c_size_t(0), ctypes.byref(found))
        call("PMIx_Get", *got)
        if found.contents.type != _STRING:
            raise _Failed(f"node 0 has put a value of type {found.contents.type}, and no text")
        told = found.contents.string.decode()
        call("PMIx_Finalize", None, ctypes.c_size_t(0))
        tell("text", told)
    except (_Failed, AttributeError) as error:  # a library without one of the functions
        tell("failed", " ".join(str(error).split()))


class _Failed(Exception):
    """Reason why the exchange cannot go on."""


def _versions(library: ctypes.CDLL, environ: Mapping[str, str]) -> str:
    own = library.PMIx_Get_version().decode().partition(" (")[0].partition(",")[0]
    return f"the library is {own}, the server PMIx {environ.get('PMIX_VERSION', 'of no version')}"


def _candidates(environ: Mapping[str, str]) -> list[str]:
    """Return where the library may be: that of the launcher first."""
    given = [environ.get(name, "") for name in ("OMPI_LIBDIR_LOC", "PMIX_PREFIX")]
    folders = [given[0], f"{given[0]}/openmpi"] if given[0] else []
    if given[1]:
        folders += [f"{given[1]}/{place}" for place in ("lib", "lib64", "lib/openmpi")]
    return [*(f"{folder}/{LIBRARY}" for folder in folders), LIBRARY]


def _load(paths: Sequence[str]) -> ctypes.CDLL:
    errors = []
    for path in paths:
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            if "/" not in path or os.path.exists(path):
                errors.append(str(error))
    raise _Failed("; ".join(errors))

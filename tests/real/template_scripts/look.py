"""Writes what a program can see of its own process to the file named first, as JSON; with `--torch` also what it sees after its import."""
# mypy: disable-error-code="attr-defined, no-untyped-call"
# ruff: noqa: E402  # what is loaded is looked at before anything is imported

import sys

seen = {"modules": sorted(sys.modules), "main": {name: repr(value) for name, value in sorted(globals().items()) if name != "sys"}}

import ctypes
import faulthandler
import gc
import hashlib
import json
import locale
import logging
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import random
import resource
import signal
import tempfile
import threading
import time
import uuid
import warnings
from typing import Any, TextIO

libc = ctypes.CDLL(None)


def status(*names: str) -> dict[str, str]:
    with open("/proc/self/status") as file:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in file)
    return {name: fields[name] for name in names}


def number(path: str) -> int:
    with open(path) as file:
        return int(file.read())


def descriptors() -> dict[str, list[Any]]:
    found = {}
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            found[name] = [os.readlink(f"/proc/self/fd/{name}").split(":")[0], os.get_inheritable(int(name))]
        except OSError:  # the listing's own
            continue
    return found


def stream(one: TextIO) -> dict[str, Any]:
    layers = [one, one.buffer, getattr(one.buffer, "raw", one.buffer)]
    names = ("encoding", "errors", "line_buffering", "write_through", "newlines", "mode", "name", "closed", "closefd")
    return {
        "isatty": one.isatty(),
        "fileno": one.fileno(),
        "repr": repr(one),
        "able": [one.readable(), one.writable(), one.seekable()],
        "layers": [[type(layer).__name__, *(repr(getattr(layer, name, "absent")) for name in names)] for layer in layers],
        "original": getattr(sys, f"__{one.name.strip('<>')}__") is one,
    }


def handlers() -> dict[int, str]:
    found = {which: signal.getsignal(which) for which in sorted(signal.valid_signals())}
    return {int(which): getattr(handler, "__name__", repr(handler)) for which, handler in found.items()}


def loggers() -> dict[str, Any]:
    named = [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    return {
        "root": [repr(logging.root.handlers), logging.root.level, logging.root.disabled, logging.root.manager.disable],
        "loggers": sorted(f"{one.name} {one.level} {len(one.handlers)} {one.propagate}" for one in named),
    }


def prctl(option: int) -> int:
    value = ctypes.c_int(-1)
    libc.prctl(option, ctypes.byref(value), 0, 0, 0)
    return value.value


def interpreter() -> dict[str, Any]:
    names = (
        "argv", "path", "orig_argv", "flags", "executable", "prefix", "base_prefix", "exec_prefix", "warnoptions", "_xoptions",
        "dont_write_bytecode", "pycache_prefix", "path_hooks", "meta_path", "excepthook", "displayhook", "unraisablehook", "breakpointhook",
    )  # fmt: skip
    calls = (
        "getrecursionlimit", "getswitchinterval", "gettrace", "getprofile", "getfilesystemencoding", "getfilesystemencodeerrors",
        "getdlopenflags", "get_asyncgen_hooks", "get_coroutine_origin_tracking_depth", "get_int_max_str_digits",
    )  # fmt: skip
    return {
        **{name: repr(getattr(sys, name)) for name in names},
        **{name: repr(getattr(sys, name)()) for name in calls},
        "path_importer_cache": sorted(sys.path_importer_cache),
    }


def process() -> dict[str, Any]:
    mask = os.umask(0)
    os.umask(mask)
    with open("/proc/self/environ", "rb") as file:
        environ = sorted(entry.decode() for entry in file.read().split(b"\0") if entry)
    main = threading.main_thread()
    return {
        "environ": dict(os.environ),
        "first environ": environ,
        "cwd": os.getcwd(),
        "umask": mask,
        "handlers": handlers(),
        "status": status("Umask", "SigIgn", "SigCgt", "SigBlk", "Threads", "NoNewPrivs", "CapEff", "Uid", "Gid", "Groups", "Cpus_allowed"),
        "name": status("Name"),
        "mask": sorted(int(which) for which in signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "wakeup": signal.set_wakeup_fd(-1),
        "timers": [signal.getitimer(which) for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)],
        "streams": {name: stream(getattr(sys, name)) for name in ("stdin", "stdout", "stderr")},
        "descriptors": descriptors(),
        "ids": {
            "session leader": os.getsid(0) == os.getpid(),
            "group leader": os.getpgid(0) == os.getpid(),
            "thread": main.native_id == os.getpid(),
            "ident": main.ident == threading.get_ident(),
            "current": main is threading.current_thread(),
        },
        "threads": [main.name, threading.active_count()],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")},
        "kernel": [number("/proc/self/oom_score_adj"), number("/proc/self/timerslack_ns"), os.nice(0), os.sched_getscheduler(0)],
        "processors": sorted(os.sched_getaffinity(0)),
        "prctl": {"pdeathsig": prctl(2), "subreaper": prctl(37), "dumpable": libc.prctl(3), "keepcaps": libc.prctl(7)},
    }


def library() -> dict[str, Any]:
    current = multiprocessing.process.current_process()
    return {
        "gc": {"enabled": gc.isenabled(), "thresholds": gc.get_threshold(), "debug": gc.get_debug(), "frozen": gc.get_freeze_count()},
        "gc callbacks": repr(gc.callbacks),
        "faulthandler": faulthandler.is_enabled(),
        "warnings": repr(warnings.filters),
        "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), locale.getlocale()],
        "logging": repr(logging.root.handlers),
        "multiprocessing": {
            "start": multiprocessing.get_start_method(allow_none=True),
            "process": [current.name, current.daemon, repr(current._identity), current.ident == os.getpid()],
            "parent": repr(multiprocessing.parent_process()),
            "original": multiprocessing.process.ORIGINAL_DIR,
            "tracker": multiprocessing.resource_tracker._resource_tracker._fd,
            "temporary": repr(current._config.get("tempdir")),
            "children": len(multiprocessing.active_children()),
            "main": repr(sys.modules["__mp_main__"]),
        },
        "authkey": hashlib.sha256(bytes(current.authkey)).hexdigest(),
        "random": {
            "random": random.random(),
            "system": random.SystemRandom().random(),
            "uuid1": str(uuid.uuid1()),
            "uuid4": str(uuid.uuid4()),
            "temporary": next(tempfile._get_candidate_names()),
        },
        "node": uuid.getnode(),
        "tempdir": tempfile.gettempdir(),
        "clock": time.get_clock_info("monotonic").implementation,
    }


def loaded(name: str) -> list[ctypes.CDLL]:
    """The shared libraries in this process with this in their name."""
    with open("/proc/self/maps") as file:
        return [ctypes.CDLL(path) for path in sorted({line.split(maxsplit=5)[5].strip() for line in file if name in line and "/" in line})]


def after_torch() -> dict[str, Any]:
    import numpy
    import torch
    import torch.distributed

    blas = (getattr(one, f"scipy_openblas_get_num_threads{end}", None) for one in loaded("openblas") for end in ("64_", ""))
    return {
        "torch": {
            "threads": torch.get_num_threads(),
            "interop": torch.get_num_interop_threads(),
            "seed": torch.initial_seed(),
            "rand": torch.rand(1).item(),
            "dtype": repr(torch.get_default_dtype()),
            "switches": [torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled],
            "sharing": torch.multiprocessing.get_sharing_strategy(),
            "precision": torch.get_float32_matmul_precision(),
            "parallel": torch.__config__.parallel_info(),
        },
        "numpy": numpy.random.rand(),
        "openblas": [one() for one in blas if one is not None],
        "gomp": [one.omp_get_max_threads() for one in loaded("gomp")],
        "warnings after torch": repr(warnings.filters),
        "modules after torch": sorted(sys.modules),
        "hooks after torch": repr([sys.excepthook, sys.displayhook, threading.excepthook]),
        "descriptors after torch": descriptors(),
        "threads after torch": status("Threads")["Threads"],
        "multiprocessing after torch": [
            multiprocessing.get_start_method(allow_none=True),
            multiprocessing.resource_tracker._resource_tracker._fd,
            len(multiprocessing.util._finalizer_registry),
        ],
        "logging after torch": loggers(),
        "gc after torch": [gc.isenabled(), gc.get_threshold(), repr(gc.callbacks)],
        "handlers after torch": handlers(),
        "status after torch": status("SigIgn", "SigCgt", "SigBlk"),
        "environ after torch": dict(os.environ),
    }


seen.update(sys=interpreter(), **process(), **library())
if "--torch" in sys.argv:
    seen.update(after_torch())
with open(sys.argv[1], "w") as output:
    json.dump(seen, output, indent=1)

"""What a program can see of how it was started, as one line of JSON."""

import json
import multiprocessing
import os
import resource
import signal
import sys
import threading

umask = os.umask(0)
os.umask(umask)
descriptors = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}")]
facts = {
    "env": dict(os.environ),
    "argv": sys.argv,
    "orig_argv": sys.orig_argv[1:],
    "path": sys.path,
    "cwd": os.getcwd(),
    "name": __name__,
    "file": __file__,
    "doc": __doc__,
    "spec": repr(__spec__),
    "package": __package__,
    "loader": type(__loader__).__name__,
    "builtins": type(__builtins__).__name__,
    "names": sorted(name for name in globals() if name not in ("umask", "descriptors")),
    "main": sys.modules["__main__"].__dict__ is globals(),
    "flags": {name: getattr(sys.flags, name) for name in dir(sys.flags) if not name.startswith(("_", "n_", "count", "index"))},
    "leads its session": os.getsid(0) == os.getpid(),
    "leads its group": os.getpgid(0) == os.getpid(),
    "terminals": [os.isatty(number) for number in range(3)],
    "descriptors": descriptors,
    "inherited by its children": [number for number in descriptors if os.get_inheritable(number)],
    "handlers": {one.name: str(signal.getsignal(one)) for one in signal.Signals if one.name not in ("SIGKILL", "SIGSTOP")},
    "blocked signals": [one.name for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "threads": (threading.active_count(), len(os.listdir("/proc/self/task"))),
    "start method": multiprocessing.get_start_method(allow_none=True),
    "streams": [
        (one.name, one.mode, one.encoding, one.errors, one.line_buffering, one.write_through) for one in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "umask": umask,
    "nice": os.nice(0),
    "excepthook": sys.excepthook is sys.__excepthook__,
    "displayhook": sys.displayhook is sys.__displayhook__,
    "warnoptions": sys.warnoptions,
    "recursion": sys.getrecursionlimit(),
    "tracing": (sys.gettrace(), sys.getprofile()),
    "open files limit": resource.getrlimit(resource.RLIMIT_NOFILE),
    "bytecode": sys.dont_write_bytecode,
}

if os.environ["RANK"] in os.environ.get("FACTS_OF_TORCH", "01"):
    import torch

    facts["torch threads"] = torch.get_num_threads()
    facts["torch seed"] = torch.initial_seed()
sys.stdout.write(json.dumps(facts) + "\n")

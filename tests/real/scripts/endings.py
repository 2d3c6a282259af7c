"""Ends of programs, each in a fork of its own: argv[1] is a folder, in which each leaves a file with its exit status and what it said.

A text between quotes is run as `__main__`, and then the process leaves as any program does.
"""

from __future__ import annotations

import os
import sys

CASES = {
    "objects": """
class Noisy:
    def __init__(self, name): self.name = name
    def __del__(self): print("deleted", self.name, KEPT)
KEPT = "still there"
noisy = Noisy("one of __main__")
cycle = Noisy("in a cycle"); cycle.itself = cycle
def half_done():
    try: yield
    finally: print("generator closed")
running = half_done(); next(running)
""",
    "finalizers and handlers": """
import atexit, weakref, threading, time, concurrent.futures
class Thing: pass
thing = Thing()
weakref.finalize(thing, print, "finalized")
atexit.register(print, "registered first"); atexit.register(print, "registered last")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread joined"))).start()
pool = concurrent.futures.ThreadPoolExecutor(1); pool.submit(lambda: (time.sleep(0.6), print("pool joined")))
""",
    "a module of the program": """
open("module_of_mine.py", "w").write('''
class Late:
    def __del__(self): print("deleted with its module")
late = Late()
held = open("held.txt", "w"); held.write("unflushed")
''')
import sys; sys.path.insert(0, "."); import module_of_mine
""",
    "a library knows a function of the program": """
import logging
file = open("known.txt", "w"); file.write("unflushed")
def of_mine(): pass
logging.of_mine = of_mine
""",
    "a library holds a file": """
import logging
logging.of_mine = open("of_mine.txt", "w"); logging.of_mine.write("unflushed")
""",
    "a daemon thread of the program": """
import logging, threading, time
class Mine:
    def __del__(self): print("deleted")
mine = Mine()
def of_mine(): pass
logging.of_mine = of_mine
def run():
    while True: time.sleep(0.01)
threading.Thread(target=run, daemon=True).start(); time.sleep(0.1)
""",
    "no collector": """
import gc; gc.disable()
class Mine:
    def __del__(self): print("deleted")
mine = Mine(); mine.itself = mine
""",
    "standard output is a file": """
import sys; sys.stdout = open("stdout.txt", "w"); print("unflushed")
""",
    "C streams and handlers": """
import ctypes
libc = ctypes.CDLL(None)
libc.printf(b"by printf\\n")
libc.strdup.restype = ctypes.c_void_p
libc.__cxa_atexit(libc.puts, ctypes.c_void_p(libc.strdup(b"a handler of C's")), None)
""",
    "a daemon thread": """
import threading, time
def run():
    import json
    while True: json.dumps({"a": time.time()})
threading.Thread(target=run, daemon=True).start(); time.sleep(0.1)
""",
    "ignored": """
class Mine:
    def __del__(self): raise RuntimeError("in __del__")
mine = Mine()
""",
    "finalizing": """
import sys
class Mine:
    def __del__(self): print(sys.is_finalizing())
mine = Mine()
""",
    "a full disk": """
import sys; sys.stdout = open("/dev/full", "w"); print("lost")
""",
    "uncaught": "raise ValueError('uncaught')",
    "interrupted": "raise KeyboardInterrupt",
    "status 3": "import sys; sys.exit(3)",
    "status of a text": "import sys; sys.exit('a text')",
    "status -1": "import sys; sys.exit(-1)",
    "too large a status": "import sys; sys.exit(2**70 + 3)",
    "imports at the end": """
class Mine:
    def __del__(self):
        import json
        print(json.dumps("imported"))
mine = Mine(); mine.itself = mine
""",
    "logging": """
import logging.handlers
target = logging.FileHandler("log.txt"); buffered = logging.handlers.MemoryHandler(100, target=target)
logging.getLogger().addHandler(buffered); logging.warning("kept until the end")
""",
    "children of multiprocessing": """
import multiprocessing, atexit
def child(): atexit.register(print, "not called"); print("child")
process = multiprocessing.get_context("fork").Process(target=child); process.start()
""",
    "a loader": """
import torch
loader = torch.utils.data.DataLoader(list(range(8)), num_workers=1, persistent_workers=True)
batches = iter(loader); print(next(batches))
""",
    "a profile": """
import torch
with torch.autograd.profiler.profile() as profile: torch.ones(3) + 1  # torch.profiler imports a compiler
print(any(event.key == "aten::add" for event in profile.key_averages()))
""",
    "a group that is not closed": """
import torch.distributed as dist, tempfile
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
import torch; dist.all_reduce(torch.ones(3))
""",
    "profiled": """
import atexit, cProfile, io, pstats
profile = cProfile.Profile(); profile.enable()
def report():
    profile.disable(); said = io.StringIO(); pstats.Stats(profile, stream=said).print_stats(); print("function calls" in said.getvalue())
atexit.register(report); sorted([3, 2])
""",
}


def end_as(name: str, folder: str) -> None:
    """In a fork: be the program of that name."""
    os.chdir(folder)
    fd = os.open(f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    exec(compile(CASES[name], name, "exec"), sys.modules["__main__"].__dict__)


def run_all(folder: str) -> str | None:
    """The name of the case that this process is to be, None in the process that has started them all and seen their ends."""
    started: dict[int, str] = {}
    for name in sorted(CASES, key=lambda name: "import torch" in CASES[name]):
        if "import torch" in CASES[name]:
            import torch.distributed  # once for all of them

        os.makedirs(os.path.join(folder, name))
        pid = os.fork()
        if pid == 0:
            return name
        started[pid] = name
    for pid, name in started.items():
        _, status = os.waitpid(pid, 0)
        with open(os.path.join(folder, name, "status"), "w") as file:
            file.write(str(os.waitstatus_to_exitcode(status)))
    return None


which = run_all(sys.argv[1])
if which is not None:
    end_as(which, os.path.join(sys.argv[1], which))

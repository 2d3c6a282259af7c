"""A process that a rank started itself, and whose traceback torch puts into the message of another
exception: that one is shown.
"""

from __future__ import annotations

import msgspec
import pytest

from rallypoint.diagnosis.evidence import (
    Ended,
    Frame,
    JobEvidence,
    NodeEvidence,
    Raised,
    RankEvidence,
)
from rallypoint.diagnosis.logs.reader import Reader
from rallypoint.diagnosis.logs.to_evidence import diagnose as log_diagnosis
from rallypoint.diagnosis.report import Report
from rallypoint.diagnosis.root_cause import diagnose

SITE = "/venv/lib/python3.11/site-packages"
TORCH = f"{SITE}/torch"
MAIN = Frame("/home/ada/train.py", 12, "<module>", "for x in loader:")
PASSED_ON = Frame(f"{TORCH}/_utils.py", 794, "reraise", "raise exception")
WORKER = f"""\
  File "{TORCH}/utils/data/_utils/worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
"""
LOST = "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:21933: Connection reset by peer. GLHF!"
IN_LOADER = (
    "Caught {kind} in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n"
)


def judged(kind: str, message: str) -> Report:
    shown = f'Traceback (most recent call last):\n  File "{MAIN.file}", line 12, in <module>\n    {MAIN.source}\n{kind}: {message}'
    error = Raised(kind, message, (MAIN, PASSED_ON), shown, at=2.0)
    ranks = (
        RankEvidence(0, 0, 4000, ended=Ended(), phase="done"),
        RankEvidence(1, 1, 4001, ended=Ended(1, 0, 2.5), phase="running", raised=error),
    )
    (report,) = diagnose(JobEvidence("train.py", 2, (NodeEvidence(ranks),)))
    return report


def test_what_a_loaders_worker_raised_is_shown_where_it_raised_it() -> None:
    inner = (
        WORKER
        + "  File \"/home/ada/data.py\", line 7, in __getitem__\n    return self.rows[name]\nKeyError: 'a.png'\n"
    )
    report = judged("KeyError", IN_LOADER.format(kind="KeyError") + inner)
    assert report.headline == "rank 1 raised KeyError: 'a.png' (in DataLoader worker process 1)"
    assert report.where == "data.py:7 in __getitem__, in a DataLoader worker of pid 4001"
    (said,) = report.said
    assert said.lines[-3:] == (
        '  File "/home/ada/data.py", line 7, in __getitem__',
        "    return self.rows[name]",
        "KeyError: 'a.png'",
    )


def test_a_long_traceback_in_a_message_loses_frames_and_not_the_exception() -> None:
    """The line that stands for what was left out ended the traceback: the exception in it was lost."""
    deeper = "".join(
        f'  File "{TORCH}/utils/data/_utils/fetch.py", line {i}, in fetch\n    data = deeper\n'
        for i in range(2000)
    )
    own = '  File "/home/ada/data.py", line 7, in __getitem__\n    raise KeyError(name)\n'
    message = IN_LOADER.format(kind="KeyError") + WORKER + deeper + own + "KeyError: 'a.png'\n"
    report = judged("KeyError", message)
    assert report.headline == "rank 1 raised KeyError: 'a.png' (in DataLoader worker process 1)"
    assert report.where == "data.py:7 in __getitem__, in a DataLoader worker of pid 4001"


def test_an_exception_that_was_cut_is_not_cut_again() -> None:
    for text in ("x" * 1_000_000, "\u20ac" * 100_000, "two words\n" * 40_000):
        error = Raised("ValueError", text, (), text)
        assert len(error.message) < len(error.traceback) < len(text)
        assert (error.message[:2000], error.message[-2000:]) == (text[:2000], text[-2000:])
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(error), type=Raised)
        assert (again.message, again.traceback) == (error.message, error.traceback)


def test_what_the_library_raised_in_the_worker_is_placed_at_the_programs_line() -> None:
    inner = (
        WORKER
        + f'  File "{TORCH}/utils/data/_utils/collate.py", line 9, in collate\nRuntimeError: stack expects each tensor to be equal size\n'
    )
    report = judged("RuntimeError", IN_LOADER.format(kind="RuntimeError") + inner)
    assert report.where == "train.py:12 in <module> (torch reraise), pid 4001"
    assert report.said[0].lines[-1] == "RuntimeError: stack expects each tensor to be equal size"


def test_a_process_of_mp_spawn_whose_cause_is_not_known_says_its_own_words() -> None:
    inner = f'Traceback (most recent call last):\n  File "{TORCH}/multiprocessing/spawn.py", line 96, in _wrap\n    fn(i, *args)\n'
    inner += f'  File "/home/ada/train.py", line 5, in worker\n    dist.all_reduce(t)\n{LOST}\n'
    kind = "torch.multiprocessing.spawn.ProcessRaisedException"
    report = judged(kind, f"\n\n-- Process 0 terminated with the following error:\n{inner}")
    assert report.code == "cause-unknown"
    assert report.said[0].lines[-2:] == (
        "    dist.all_reduce(t)",
        "RuntimeError: [pair.cc:537] Read error [127.0.0.1]:21933: Connection reset by peer. GLHF!",
    )


def test_a_port_that_another_set_of_ranks_had() -> None:
    taken = "The server socket has failed to listen on any local network address. port: 29517, useIpv6: false, code: -98, name: EADDRINUSE"
    inner = f'Traceback (most recent call last):\n{WORKER}  File "/home/ada/train.py", line 5, in worker\n    dist.init_process_group("gloo")\n'
    message = f"\n\n-- Process 0 terminated with the following error:\n{inner}torch.distributed.DistNetworkError: {taken}\n"
    error = Raised(
        "torch.multiprocessing.spawn.ProcessRaisedException",
        message,
        (MAIN, PASSED_ON),
        "Traceback",
        at=2.0,
    )
    failed = RankEvidence(0, 0, 4000, ended=Ended(1, 0, 2.1), phase="running", raised=error)
    gone = "a connection that was closed on 127.0.0.1:29517 is still in TIME_WAIT, at most 60 s"
    (report,) = diagnose(
        JobEvidence(
            "train.py",
            2,
            (
                NodeEvidence(
                    (failed, RankEvidence(1, 1, 4001, phase="running", sent=("SIGTERM",))),
                    holders=(gone,),
                ),
            ),
        )
    )
    assert report.code == "port-in-use"
    assert report.where == "train.py:5 in worker, pid 4000"
    assert report.why == "whoever listened there has gone since"
    assert report.evidence == (
        "it was raised in process 0 of those that mp.spawn had started in rank 0",
        gone,
    )
    assert report.help[0].command == "rallypoint run -n 1 train.py"


def test_a_function_that_could_not_be_called_is_placed_where_mp_spawn_was() -> None:
    """It was placed in a file of ours, which stands between torch's and the function."""
    ours = f'File "{SITE}/rallypoint/launcher/worker/mp_spawn.py", line 46, in __call__'
    message = (
        "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n"
        f'  File "{TORCH}/multiprocessing/spawn.py", line 87, in _wrap\n    fn(i, *args)\n'
        f"  {ours}\n    return self._function(index, *args)\n"
        "TypeError: train() missing 1 required positional argument: 'size'\n"
    )
    report = judged("torch.multiprocessing.spawn.ProcessRaisedException", message)
    assert (
        report.headline
        == "rank 1 raised TypeError: train() missing 1 required positional argument: 'size'"
    )
    assert report.where.startswith("train.py:12 in <module>")


def test_what_a_task_of_rays_raised_is_the_exception() -> None:
    """Its header was the headline: "rank 1 raised ray.exceptions.RayTaskError(ValueError):
    ray::shard() (pid=15407, ip=192.0.2.2)". One task had called another here.
    """
    message = (
        "\x1b[36mray::epoch()\x1b[39m (pid=15407, ip=192.0.2.2)\n"
        '  File "/home/ada/train.py", line 9, in epoch\n    ray.get(shard.remote(1))\n'
        "ray.exceptions.RayTaskError(ValueError): \x1b[36mray::shard()\x1b[39m (pid=15408, ip=192.0.2.2)\n"
        '  File "/home/ada/data.py", line 6, in shard\n    raise ValueError("it is empty")\n'
        "ValueError: it is empty"
    )
    report = judged("ray.exceptions.RayTaskError(ValueError)", message)
    assert report.headline == "rank 1 raised ValueError: it is empty"
    assert report.where == "data.py:6 in shard, pid 4001"
    assert report.evidence == (
        "it was raised in Ray's task shard() (pid=15408, ip=192.0.2.2), for rank 1",
    )
    (said,) = report.said
    assert said.lines[-1] == "ValueError: it is empty"


BY_POOL = """\
{kind}:
\"\"\"
Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/pool.py", line 125, in worker
    result = (True, func(*args, **kwds))
  File "/home/ada/data.py", line 7, in load
    return rows[name]
KeyError: 'a.png'
\"\"\"

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/ada/train.py", line 12, in <module>
    pool.map(load, names)
  File "/usr/lib/python3.11/multiprocessing/pool.py", line 774, in get
    raise self._value
KeyError: 'a.png'"""


@pytest.mark.parametrize(
    "kind",
    ["multiprocessing.pool.RemoteTraceback", "concurrent.futures.process._RemoteTraceback"],
)
def test_what_a_process_of_a_pool_raised_is_shown_where_it_raised_it(kind: str) -> None:
    """The log was told as an error of multiprocessing, for which the program was not at fault."""
    shown = BY_POOL.format(kind=kind)
    raised_in = Frame(
        "/usr/lib/python3.11/multiprocessing/pool.py", 774, "get", "raise self._value"
    )
    error = Raised("KeyError", "'a.png'", (MAIN, raised_in), shown, at=2.0)
    ranks = (RankEvidence(0, 0, 4000, ended=Ended(1, 0, 2.5), phase="running", raised=error),)
    (of_run,) = diagnose(JobEvidence("train.py", 1, (NodeEvidence(ranks),)))
    marked = "\n".join(f"[rank0]: {line}" if line else line for line in shown.splitlines())
    (of_log,) = log_diagnosis(Reader("train.log").read([marked.encode()]))
    for report in (of_run, of_log):
        assert report.headline == "rank 0 raised KeyError: 'a.png'"
        assert "data.py:7 in load" in report.where
        assert report.confidence == "certain"
        assert "    return rows[name]" in report.said[0].lines

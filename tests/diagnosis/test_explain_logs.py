"""Every log of the corpus is told its cause; what is no failure is told to be none."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import pathlib
import random
import re
import threading

import pytest
from bench.log_corpus import HALVES, Expected, expected

from rallypoint.diagnosis import render, tracebacks
from rallypoint.diagnosis.catalogue import CATALOGUE
from rallypoint.diagnosis.logs import log_files, prefixes
from rallypoint.diagnosis.logs.line_filter import Sifter, as_utf8, shown
from rallypoint.diagnosis.logs.reader import Reader, together
from rallypoint.diagnosis.logs.sightings import MOST_SIGHTINGS
from rallypoint.diagnosis.logs.to_evidence import diagnose
from rallypoint.diagnosis.report import Report
from rallypoint.errors import UsageError


def _told(text: str | bytes, log: str = "train.log") -> tuple[Report, ...]:
    return diagnose(Reader(log).read([text.encode() if isinstance(text, str) else text]))


def _amiss(one: Expected) -> str:
    """Return what is told otherwise of a log than it must be."""
    reports = _told(one.path.read_bytes(), one.path.name)
    report, text = reports[0], render.text(reports)
    code = report.code if report.code in one.also else one.code
    if (report.code, report.ranks if one.ranks else ()) != (code, one.ranks):
        return f"not {code} of {one.ranks}, but\n{text}"
    if one.line and report.logs != (f"{one.path.name}:{one.line}",):
        return f"not at line {one.line}, but\n{text}"
    if report.code not in CATALOGUE:
        return f"no code of the catalogue: {report.code}"
    if report.exit_status != (report.code == "cause-unknown"):
        return f"exit status {report.exit_status} of {report.code}"
    if "rallypoint had sent" in text or "rank -1" in text:
        return text
    return ""


@pytest.mark.parametrize("half", HALVES)
def test_every_log_of_the_corpus(half: str) -> None:
    """One test for many logs: most take less than a test does before and after it."""
    amiss = {one.name: _amiss(one) for one in expected() if one.half == half}
    said = [f"{name}: {words}" for name, words in amiss.items() if words]
    assert not said, "\n".join(said)


@pytest.mark.parametrize("size", [1, 7, 64, 4096])
def test_however_the_bytes_are_cut(size: int) -> None:
    """Also in the middle of a letter, and between a \\r and its \\n."""
    for name in ("torchrun-peers-lost", "torchrun-bars", "spawn-raise", "kubernetes-sigterm"):
        data = next(one.path for one in expected() if one.name == name).read_bytes()
        whole = diagnose(Reader("x").read([data]))
        assert (
            diagnose(Reader("x").read([data[i : i + size] for i in range(0, len(data), size)]))
            == whole
        )
        windows = data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
        assert diagnose(Reader("x").read([windows]))[0].headline == whole[0].headline


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-32"])
def test_encodings(encoding: str) -> None:
    text = 'Traceback (most recent call last):\n  File "/srv/t.py", line 3, in <module>\n    größe()\nValueError: zu groß: 3 µm\n'
    report = _told(text.encode(encoding))[0]
    assert report.headline == "the program raised ValueError: zu groß: 3 µm"


def test_latin_1_and_zero_bytes() -> None:
    text = 'Traceback (most recent call last):\n  File "/srv/t.py", line 3, in <module>\n    größe()\nValueError: zu groß\n'
    assert _told(text.encode("latin-1"))[0].headline == "the program raised ValueError: zu groß"
    assert _told(b"\0" + text.encode())[0].headline == "the program raised ValueError: zu groß"


def test_memory_does_not_grow_with_what_is_read() -> None:
    """Neither by one endless line, nor by errors that differ."""
    reader = Reader("x")
    findings = reader.read(b"a\r" * 500_000 for _ in range(4))
    assert findings.sightings == ()
    endless = Reader("x").read([b"x" * (1 << 20)] * 16 + [b"\nValueError: x\n"])
    assert [sighting.place.line for sighting in endless.sightings] == [2]
    words = [
        "".join(chr(97 + (i >> shift) % 16) for shift in (0, 4, 8, 12))
        for i in range(MOST_SIGHTINGS + 500)
    ]
    many = Reader("x").read(f"ValueError: {word} is bad\n".encode() for word in words)
    assert len(many.sightings) == MOST_SIGHTINGS


def test_lines_are_counted_and_dull_ones_passed() -> None:
    sifter = Sifter()
    seen = []
    for line in sifter.feed(
        b"".join(b"step %d: signal ok\nnothing\n" % i for i in range(100)) + b"an Error\n"
    ):
        seen.append((line.number, line.text))
        before = [line.text for line in sifter.before(2)]
        if "signal" in line.text:
            sifter.call_dull()
    assert seen == [(1, "step 0: signal ok"), (201, "an Error")]
    assert before == ["step 99: signal ok", "nothing"]


def test_colours_bars_and_json() -> None:
    assert shown(b"\x1b[31mValueError\x1b[0m: x") == ["ValueError: x"]
    assert shown(b"#033[31mValueError#033[0m: x ^[[0m") == ["ValueError: x"]
    assert shown("File “a.py”".encode()) == ['File "a.py"']
    assert shown(b'{"log":"ValueError: x\\n","stream":"stderr"}') == ["ValueError: x"]
    assert shown(b'{"msg":"bad","rank":3,"exc_info":"A:\\n  b"}') == [
        "[rank3]: bad",
        "[rank3]: A:",
        "[rank3]:   b",
    ]
    assert b"".join(as_utf8([b"\xff\xfea\0", b"b\0"])) == b"ab"


@pytest.mark.parametrize(
    ("line", "rank", "text"),
    [
        ("[rank3]: x", 3, "x"),
        ("[default1]:[rank5]: x", 5, "x"),
        ("[1,7]<stderr>:x", 7, "x"),
        ("12: x", 12, "x"),
        ("2026-11-22T10:00:00.5Z stderr F [rank1]: x", 1, "x"),
        ("Nov 22 10:11:12 gpu07 train[41]: [rank2]:   x", 2, "  x"),
        ("[2] x", 2, "x"),
        ("step 3: x", -1, "step 3: x"),
        ("  File x", -1, "  File x"),
    ],
)
def test_prefixes(line: str, rank: int, text: str) -> None:
    speaker, said = prefixes.split(line)
    assert (speaker.rank, said) == (rank, text)


def test_an_error_that_was_handled_is_no_cause() -> None:
    """The same process went on for long, and another one says why it died."""
    handled = '[rank0]: Traceback (most recent call last):\n[rank0]:   File "r.py", line 4, in read\n[rank0]: ValueError: truncated\n'
    steps = "".join(f"[rank0]: step {i}\n" for i in range(20))
    died = "[rank1]: Traceback (most recent call last):\n[rank1]:   File \"t.py\", line 9, in main\n[rank1]: KeyError: 'lr'\n"
    report = _told(handled + steps + died)[0]
    assert (report.code, report.ranks, report.confidence) == ("rank-raised", (1,), "certain")
    alone = _told(handled + steps)[0]
    assert alone.confidence == "possible"


OPTIONAL = """\
Traceback (most recent call last):
  File "/home/a/train.py", line 3, in <module>
    import flash_attn
ModuleNotFoundError: No module named 'flash_attn'
flash_attn not available, falling back to sdpa
"""


def test_an_optional_module_that_is_not_there_is_no_cause() -> None:
    """A job that went well was said to have raised it."""
    steps = "".join(f"step {i} loss 0.{i}\n" for i in range(300))
    assert _told(OPTIONAL + steps + "Training complete. Exiting.\n")[0].code == "cause-unknown"
    # what a script writes at the end of a job does not show that the program went on
    assert _told(OPTIONAL + steps[:400])[0].code == "rank-raised"
    assert _told(OPTIONAL + steps + FAILED.format(1, 7))[0].code == "rank-raised"


def test_an_import_that_failed_each_time_a_container_was_started_is_the_cause() -> None:
    """The next start wrote as many lines as a program that does without the module."""
    start = "".join(f"Collecting package-{i}\n" for i in range(160))
    (report,) = _told(3 * (start + OPTIONAL) + start)
    assert (report.code, report.confidence) == ("rank-raised", "possible")
    assert report.logs == ("train.log:491",)


def test_only_lines_of_its_own_process_show_that_it_did_without_a_module() -> None:
    """Neither those of other ranks, nor those of other logs."""
    steps = [f"step {i} loss 0.{i}\n" for i in range(80)]
    note = "".join(f"wandb: note {'abcdefghijklmnopq'[:i]}\n" for i in range(1, 17))
    logs = {f"rank{i}.log": "".join(steps) for i in range(3)} | {"rank3.log": OPTIONAL + note}
    found = [
        Reader(name, prefixes.of_file(name)).read([text.encode()]) for name, text in logs.items()
    ]
    assert diagnose(together(found))[0].ranks == (3,)
    of_rank = "".join(f"[rank3]: {line}\n" for line in (OPTIONAL + note).splitlines())
    others = "".join(f"[rank{i}]: {step}" for i in range(3) for step in steps)
    assert _told(of_rank + others)[0].ranks == (3,)
    worked = "".join(f"[rank3]: {step}" for step in 2 * steps)
    assert _told(of_rank + others + worked)[0].code == "cause-unknown"


@pytest.mark.parametrize(
    "last",
    [
        "pydantic_core.ValidationError: 1 validation error for Config\nlr\n  Input should be a valid number",
        'yaml.scanner.ScannerError: mapping values are not allowed here\n  in "conf.yaml", line 3, column 9',
        'RuntimeError: Error(s) in loading state_dict for GPT:\n\tMissing key(s) in state_dict: "a".\n\tsize mismatch for b',
    ],
)
def test_a_message_of_several_lines_is_shown_whole(last: str) -> None:
    """All but its first was left out, and taken for lines of a process that had gone on."""
    head = 'Traceback (most recent call last):\n  File "/home/ada/train.py", line 7, in <module>\n    load()\n'
    (report,) = _told(f"{head}{last}\n")
    assert report.confidence == "certain"
    assert report.said[0].lines[3:] == tuple(last.splitlines())


def test_a_consequence_before_its_cause_stays_one() -> None:
    lost = (
        '[rank0]: Traceback (most recent call last):\n[rank0]:   File "t.py", line 5, in main\n'
        "[rank0]: RuntimeError: [x/pair.cc:5] Connection closed by peer\n"
    )
    cause = "[rank1]: Traceback (most recent call last):\n[rank1]:   File \"t.py\", line 9, in main\n[rank1]: KeyError: 'lr'\n"
    report = _told(lost + cause)[0]
    assert report.headline == "rank 1 raised KeyError: 'lr'"
    assert report.logs == ("train.log:4",)
    assert report.then.startswith("rank 0 lost the connection")


def test_a_bare_consequence_names_no_cause() -> None:
    report = _told("[rank2]: RuntimeError: [x/pair.cc:5] Connection closed by peer [10.0.0.1]:4\n")[
        0
    ]
    assert report.code == "cause-unknown"
    assert report.ranks == ()
    assert report.exit_status == 1


SITE = "/venv/lib/python3.11/site-packages/torch/distributed"


def test_gloo_names_the_rank_that_never_came_by_the_key_of_its_address() -> None:
    joining = (
        'Traceback (most recent call last):\n  File "e.py", line 9, in <module>\n    dist.init_process_group("gloo")\n'
        f'  File "{SITE}/distributed_c10d.py", line 2169, in _new_process_group_helper\n    backend_class = ProcessGroupGloo(\n'
        "torch.distributed.DistStoreError: wait timeout after 4000ms, keys: /default_pg/0//cpu//0/3\n"
    )
    report = _told(joining)[0]
    assert (
        report.headline
        == "the program waited in init_process_group until the timeout; rank 3 never came"
    )
    assert (report.code, report.ranks, report.confidence) == ("ranks-missing", (3,), "likely")
    two = "".join(
        f"[rank{i}]: {line}\n"
        for i in (0, 2)
        for line in joining.replace("/0/3", f"/0/{3 - i}").splitlines()
    )
    assert (report := _told(two)[0]).ranks == (1, 3)
    assert "/default_pg/0//cpu//0/1, is where rank 1 leaves" in report.why
    others = "".join(
        f"[rank{i}]: {line}\n" for i in (0, 3) for line in joining.splitlines()
    )  # rank 3 came, and waited, too
    assert _told(others)[0].code != "ranks-missing"


def test_another_process_without_a_rank_has_no_number_below_zero() -> None:
    """torchrun writes no ranks in front of what is raised before a process group is there."""
    waiting = "".join(
        f'Traceback (most recent call last):\n  File "e.py", line {i}, in <module>\n    s.get("{key}")\n'
        f"torch.distributed.DistStoreError: wait timeout after 6000ms, keys: /{key}\n"
        for i, key in enumerate(("done", "data"))
    )
    assert _told(waiting)[0].evidence == ("another: wait timeout after 6000ms, keys: /data",)


def test_what_a_worker_of_rpc_raised_is_one_cause_with_its_caller() -> None:
    """The worker prints it, and the caller raises it anew: two causes were told."""
    inner = (
        "On WorkerInfo(id=1, name=worker1):\nValueError('exploded')\n"
        'Traceback (most recent call last):\n  File "rpc.py", line 5, in step\n'
        '    raise ValueError("exploded")\nValueError: exploded\n\n'
    )
    outer = 'Traceback (most recent call last):\n  File "rpc.py", line 12, in main\n'
    (report,) = _told(f"{inner}{outer}ValueError: ValueError: {inner}")
    assert (report.headline, report.ranks) == ("rank 1 raised ValueError: exploded", (1,))
    (report,) = _told(f"{outer}ValueError: ValueError: {inner}")
    assert (report.headline, report.ranks) == ("rank 1 raised ValueError: exploded", (1,))


def test_a_key_of_the_programs_that_nobody_set_is_named() -> None:
    waiting = "".join(
        f'[rank{i}]: Traceback (most recent call last):\n[rank{i}]:   File "e.py", line 23, in <module>\n[rank{i}]:     s.get("data")\n'
        f"[rank{i}]: torch.distributed.DistStoreError: wait timeout after 4000ms, keys: /default_pg/0//data\n"
        for i in range(2)
    )
    report = _told(waiting)[0]
    assert (report.code, report.ranks, report.confidence) == ("rank-raised", (0, 1), "likely")
    assert report.why == 'nobody set "data" in time, and no rank shows who was to'
    assert (
        _told(waiting + "[rank2]: ValueError: bad\n")[0].headline == "rank 2 raised ValueError: bad"
    )


def test_words_of_torch_that_nobody_here_knows_are_no_certain_cause() -> None:
    head = (
        'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()\n'
    )
    (strange,) = _told(head + "RuntimeError: the NCCL flux of process group 0 is inverted\n")
    (plain,) = _told(head + "RuntimeError: the loss went to infinity\n")
    assert (strange.code, strange.confidence) == ("rank-raised", "likely")
    assert (plain.code, plain.confidence) == ("rank-raised", "certain")


def test_a_port_in_use_that_has_no_number_is_looked_up_all_the_same() -> None:
    report = _told("OSError: [Errno 98] Address already in use\n")[0]
    assert [one.command for one in report.help][-1] == "ss -ltnp"


def test_two_errors_at_once_are_both_told_and_neither_is_certain_to_be_first() -> None:
    ranks = "".join(
        f'[rank{i}]: Traceback (most recent call last):\n[rank{i}]:   File "t.py", line {i}, in f\n[rank{i}]: ValueError: {w}\n'
        for i, w in enumerate("ab")
    )
    reports = _told(ranks)
    assert [report.ranks for report in reports] == [(0,), (1,)]
    assert reports[0].confidence == "likely"


def test_the_logs_of_all_ranks_together() -> None:
    one = Reader("rank0.log", prefixes.of_file("logs/rank0.log")).read(
        [b"RuntimeError: [x/pair.cc:5] Connection closed by peer\n"]
    )
    two = Reader("rank1.log", prefixes.of_file("logs/rank1.log")).read(
        [
            b'step 1\nTraceback (most recent call last):\n  File "t.py", line 9, in main\nKeyError: 3\n'
        ]
    )
    report = diagnose(together([one, two]))[0]
    assert (report.ranks, report.logs) == ((1,), ("rank1.log:2",))


def test_our_own_report_in_a_log() -> None:
    report = _told(
        "[0] step 3\nerror[rank-killed]: rank 2 was killed by SIGKILL\n\n  why    who sent SIGKILL is not known\n"
    )[0]
    assert (report.code, report.headline) == ("rank-killed", "rank 2 was killed by SIGKILL")


@pytest.mark.parametrize(
    "headline",
    [
        "error[rank-exited]: both ranks exited with code 1",
        "stopped[interrupted]: the job was stopped by SIGTERM, 37.2 s after its start",
        "error[usage]: --nnodes 1:4 is a range: jobs whose number of nodes changes are not built yet",
        "warning[job-stalled]: no rank has moved for 9 s: rank 1 waits in barrier at a.py:6",
    ],
)
def test_each_kind_of_our_own_reports_is_read_as_it_was_said(headline: str) -> None:
    """Words of the program before it are no reason to doubt it: it has seen the job itself."""
    folder = "/state/runs/a1"
    words = "[0] overwrite the output folder? [y/N]: Aborted!\n[1] the loader failed\n" * 200
    (report,) = _told(f"{words}\n{headline}\n\n  where  a.py:3\n\n  logs   {folder}\n")
    assert headline.endswith(f"[{report.code}]: {report.headline}")
    assert report.confidence == "certain"
    assert report.help[0].command == f"rallypoint show {folder}"


BY_PY_SPY = """\
step 40
Process 4711: python train.py
Thread 4711 (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2077)
    step (train.py:42)
Thread 4790 (idle): "Thread-1 (_pin)"
    wait (threading.py:324)
"""
BY_FAULTHANDLER = """\
Timeout (0:00:30)!
Thread 0x00007f5e0a1f2740 (most recent call first):
  File "/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 2827 in all_reduce
  File "/app/train.py", line 42 in step
"""


@pytest.mark.parametrize("log", [BY_PY_SPY, "step 1\n" * 60 + BY_PY_SPY, BY_FAULTHANDLER])
def test_stacks_of_a_program_that_stands_still_say_where(log: str) -> None:
    (report,) = _told(log)
    assert report.code == "cause-unknown"
    (place,) = report.evidence
    assert "train.py:42 in step (torch all_reduce)" in place
    failed = _told(
        f'{log}Traceback (most recent call last):\n  File "/app/a.py", line 3, in f\nKeyError: 3\n'
    )
    assert failed[0].code == "rank-raised"


def test_our_own_report_as_json_is_read_like_its_text() -> None:
    report = Report(
        "rank-raised", "rank 1 raised ValueError: x", logs=("/state/runs/a1/rank1.log:7",)
    )
    (told,) = _told(f"[0] step 3\n{render.json([report])}\n")
    assert (told.code, told.headline) == (report.code, report.headline)
    assert told.help[0].command == "rallypoint show /state/runs/a1"
    others = '{"exit_status": 1, "reports": [{"code": 3}], "message": "RuntimeError: boom"}\n'
    assert _told(others)[0].code == "rank-raised"


@pytest.mark.parametrize("bar", ["", "  | "])
def test_the_report_in_what_launch_raises_is_the_report(bar: str) -> None:
    """It was told as two causes: the exception of `launch`, and the one in its traceback."""
    (report,) = _told(
        f"{'  + Exception Group ' if bar else ''}Traceback (most recent call last):\n"
        f'{bar}  File "/srv/main.py", line 9, in <module>\n'
        f"{bar}    rallypoint.launch(train, nproc=2)\n"
        f"{bar}rallypoint.errors.WorkerError: error[rank-raised]: rank 1 raised ApiError: 503\n\n"
        "  where  main.py:7 in train, pid 6642\n\n  rank 1 said:\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "/srv/main.py", line 7, in train\n    | ApiError: 503\n\n'
        "  logs   /state/runs/a1/rank1.log:1\n  more   rallypoint explain rank-raised\n"
        '  +-+---------------- 1 ----------------\n    | rallypoint.errors.RemoteTraceback: \n"""\n'
        "Traceback (most recent call last):\n"
        '  File "/srv/main.py", line 7, in train\n    raise ApiError(503)\nApiError: 503"""\n'
    )
    assert report.headline == "rank 1 raised ApiError: 503"
    assert report.help[0].command == "rallypoint show /state/runs/a1"


def test_what_a_loaders_process_cannot_get_is_no_work_of_a_rank() -> None:
    """The advice for a lambda as `collate_fn` was to start ranks by `rallypoint.launch`."""
    (report,) = _told(
        "Traceback (most recent call last):\n"
        '  File "/srv/train.py", line 12, in main\n    for batch in loader:\n'
        '  File "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 500, in __iter__\n'
        "    return self._get_iterator()\n"
        '  File "/usr/lib/python3.11/multiprocessing/popen_spawn_posix.py", line 47, in _launch\n'
        "    reduction.dump(process_obj, fp)\n"
        '  File "/usr/lib/python3.11/multiprocessing/reduction.py", line 60, in dump\n'
        "    ForkingPickler(file, protocol).dump(obj)\n"
        "AttributeError: Can't pickle local object 'main.<locals>.<lambda>'\n"
    )
    assert report.code == "launch-argument"
    assert [one.command for one in report.help] == [
        "def collate(batch):",
        'DataLoader(..., multiprocessing_context="fork")',
    ]


def test_a_model_that_differs_is_told_as_one() -> None:
    words = "params[0] in this process with sizes [7, 8] appears not to match sizes of the same param in process 0."
    (report,) = _told(f"[rank1]: RuntimeError: [1]: {words}\n")
    there = "rank 1 gave DDP another model than the group's first rank: params[0] has sizes [7, 8] there"
    assert (report.headline, report.ranks) == (there, (1,))


@pytest.mark.parametrize(
    "words",
    [
        "Cannot access accelerator device when none is available.",  # model.to(local_rank)
        "FSDP needs a non-CPU accelerator device, but no accelerator device is detected.",
        "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",
        "Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1.",
        "Could not run 'aten::empty.memory_format' with arguments from the 'CUDA' backend. This",
    ],
)
def test_a_device_that_torch_does_not_have(words: str) -> None:
    assert _told(f"RuntimeError: {words}\n")[0].code == "device-missing"


QUOTED = """\
error[parameters-unused]: DDP in both ranks waits for gradients that the last step did not make

  rank 0 said:
    | Traceback (most recent call last):
    |   File "/a/train.py", line 16, in <module>
    |     loss = net(x).sum(); loss.backward()
    | RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.
    | making sure all `forward` function outputs participate in calculating loss.
    | If you already have done the above, then

  help   see their names:
             export TORCH_DISTRIBUTED_DEBUG=INFO

  logs   /state/runs/a1/rank0.log:1
"""
ABORTED = """\
terminate called after throwing an instance of 'std::bad_alloc'
  what():  std::bad_alloc

error[launcher-died]: rallypoint's template was ended by SIGABRT

  logs   /state/runs/a1
"""


@pytest.mark.parametrize(
    ("log", "code"), [(QUOTED, "parameters-unused"), (ABORTED, "launcher-died")]
)
def test_a_report_of_ours_is_whole_beside_words_that_open_something(log: str, code: str) -> None:
    """The message that it quotes took in its last lines, and a crash before it its headline."""
    (report,) = _told(log)
    assert report.code == code
    assert report.help[0].command == "rallypoint show /state/runs/a1"


def test_a_stop_after_a_stall_is_no_second_cause() -> None:
    stall = "warning[job-stalled]: no rank has moved for 9 s: rank 1 waits in barrier at a.py:6\n"
    stop = "stopped[interrupted]: the job was stopped by SIGTERM, 37.2 s after its start\n"
    assert [report.code for report in _told(stall + stop)] == ["job-stalled"]


def test_the_report_that_both_launchers_of_a_job_show_is_one() -> None:
    text = (
        "error[rank-raised]: rank 3 on node 1 (vm) raised ValueError: x\n\n  logs   vm:/r/node1\n"
    )
    read = [Reader(name).read([text.encode()]) for name in ("n0.log", "n1.log")]
    assert len(diagnose(together(read))) == 1


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_lines_are_there_is_a_report(seed: int) -> None:
    """Lines of all logs in any order, some with broken bytes: what a terminal shared by many ranks
    may look like at worst.
    """
    chosen = random.Random(seed)
    lines = [line for one in expected() for line in one.path.read_bytes().split(b"\n")]
    for _ in range(25):
        start = [chosen.randrange(len(lines)) for _ in range(chosen.randint(1, 12))]
        data = bytearray(
            b"\n".join(line for at in start for line in lines[at : at + chosen.randint(1, 8)])
            or b"x"
        )
        for _ in range(chosen.choice((0, 10))):
            data[chosen.randrange(len(data))] = chosen.randrange(256)
        reports = _told(bytes(data))
        assert reports
        assert render.text(reports)
        assert {report.code for report in reports} <= {*CATALOGUE}


def test_files_that_are_no_logs(tmp_path: pathlib.Path) -> None:
    binary = tmp_path / "model.pt"
    binary.write_bytes(bytes(range(256)) * 16)
    (tmp_path / "rank0.log").write_text("x")
    for path, words in (
        (binary, "no text"),
        (tmp_path, "is a folder"),
        (tmp_path / "none.log", "there is no file"),
    ):
        with pytest.raises(UsageError, match=words):
            list(log_files.chunks(str(path)))
    with pytest.raises(UsageError) as caught:
        list(log_files.chunks(str(tmp_path)))
    assert any(command.endswith("/rank0.log") for _, command in caught.value.help)


def test_a_folder_whose_files_vanish_meanwhile(tmp_path: pathlib.Path) -> None:
    """`explain /tmp` said that there was no file /tmp: another file had gone during the walk."""
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            for name in ("a", "b", "c"):
                (tmp_path / name).mkdir()
                (tmp_path / f"{name}.log").touch()
            for name in ("a", "b", "c"):
                (tmp_path / f"{name}.log").unlink()
                (tmp_path / name).rmdir()

    other = threading.Thread(target=churn)
    other.start()
    try:
        for _ in range(300):
            with pytest.raises(UsageError, match="is a folder"):
                list(log_files.chunks(str(tmp_path)))
    finally:
        over.set()
        other.join()


def test_of_a_folder_not_everything_is_looked_at(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`explain /` took 24 s to say that / is a folder."""
    monkeypatch.setattr(log_files, "MOST_FOLDERS", 2)
    deep = tmp_path / "first" / "second"
    deep.mkdir(parents=True)
    (deep.parent / "near.log").write_text("x")
    (deep.parent / "empty.log").touch()
    (deep / "far.log").write_text("x")
    with pytest.raises(UsageError) as caught:
        list(log_files.chunks(str(tmp_path)))
    assert [pathlib.Path(command).name for _, command in caught.value.help] == ["near.log"]


def test_compressed_files_also_when_they_are_cut_short(tmp_path: pathlib.Path) -> None:
    text = b"step\n" * 10_000 + b"ValueError: x\n"
    (tmp_path / "a.gz").write_bytes(gzip.compress(text))
    (tmp_path / "a.xz").write_bytes(lzma.compress(text))
    assert b"".join(log_files.chunks(str(tmp_path / "a.gz"))) == text
    assert b"".join(log_files.chunks(str(tmp_path / "a.xz"))) == text
    noise = os.urandom(1_500_000).hex().encode()
    (tmp_path / "cut.gz").write_bytes(gzip.compress(noise)[:-20_000])
    read = b"".join(log_files.chunks(str(tmp_path / "cut.gz")))
    assert len(read) > 1_000_000
    assert noise.startswith(read)


TRACEBACK = (
    'Traceback (most recent call last):\n  File "t.py", line 4, in <module>\n    main()\n{}\n'
)
STEPS = "".join(f"step {i} loss 0.5\n" for i in range(30))
FAILED = "E1122 10:00:00.000 1 torch/distributed/elastic/api.py:882] failed (exitcode: {}) local_rank: 2 (pid: {}) of binary: py\n"
AGAIN = "I1122 10:00:01.0 1 api.py:862] [default] Worker group FAILED. 3/3 attempts left; will restart worker group\n"


@pytest.mark.parametrize(
    ("log", "code", "confidence", "words"),
    [
        # Healthy ones, with words that frighten.
        (
            STEPS
            + "Exception ignored in: <function X.__del__ at 0x1>\n"
            + TRACEBACK.format("TypeError: x"),
            "cause-unknown",
            "certain",
            "nothing",
        ),
        (
            "cache is damaged:\n" + TRACEBACK.format("OSError: x") + "rebuilding it\ndone\n",
            "rank-raised",
            "likely",
            "OSError",
        ),
        (
            "RuntimeError: [Errno 98] Address already in use\ntrying 29501\nstep 1\n",
            "port-in-use",
            "likely",
            "in use",
        ),
        ("sample 3\nKilled\n" + STEPS, "rank-killed", "possible", "SIGKILL"),
        ("Exit code: -9\n" + STEPS, "rank-killed", "possible", "SIGKILL"),
        ("Killed  12 monsters\n", "cause-unknown", "certain", "nothing"),
        # What the shell says, as it says it.
        ("step 3\nKilled                  python train.py\n", "rank-killed", "certain", "SIGKILL"),
        (
            "./train.sh: line 3:  4312 Killed                  python train.py\n" + STEPS,
            "rank-killed",
            "certain",
            "SIGKILL",
        ),
        # Several attempts in one log: the last one ended the job.
        (
            TRACEBACK.format("OSError: s3")
            + FAILED.format(1, 7)
            + AGAIN
            + "step 1\n"
            + TRACEBACK.format("KeyError: 'lr'")
            + FAILED.format(1, 8),
            "rank-raised",
            "certain",
            "KeyError",
        ),
        (
            FAILED.format(-9, 7)
            + AGAIN
            + STEPS
            + TRACEBACK.format("KeyError: 'lr'")
            + FAILED.format(1, 8),
            "rank-raised",
            "certain",
            "KeyError",
        ),
        (FAILED.format(-9, 7) + AGAIN + STEPS, "rank-killed", "likely", "SIGKILL"),
        (
            "error[rank-raised]: rank 1 raised ValueError: x\nrallypoint: restarting all 4 ranks, attempt 1 of 2\n"
            "error[rank-killed]: rank 2 was killed by SIGKILL\n",
            "rank-killed",
            "certain",
            "rank 2",
        ),
        (
            "*** JOB 4 ON n1 CANCELLED AT 2026-01-01T10:00:00 DUE TO PREEMPTION ***\n"
            + STEPS
            + TRACEBACK.format("KeyError: 'x'"),
            "interrupted",
            "likely",
            "preemption",
        ),
        # The end of a log, without the words that led to it.
        (FAILED.format(1, 7), "rank-exited", "likely", "code 1"),
        (FAILED.format(3, 7), "rank-exited", "certain", "code 3"),
        (FAILED.format(-6, 7), "rank-crashed", "likely", "SIGABRT"),
        # Native code.
        (
            "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\nAborted (core dumped)\n",
            "rank-out-of-memory",
            "certain",
            "std::bad_alloc",
        ),
        (
            "terminate called after throwing an instance of 'std::runtime_error'\n  what():  index damaged\nAborted (core dumped)\n",
            "rank-crashed",
            "certain",
            "SIGABRT",
        ),
        (
            "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at gloo/pair.cc:456] "
            "op.preamble.length <= op.nbytes. 500 vs 4\n",
            "collective-mismatch",
            "certain",
            "500 bytes",
        ),
        ("free(): invalid pointer\nAborted (core dumped)\n", "rank-crashed", "certain", "SIGABRT"),
        (
            "/AppleInternal/x/MPSNDArray.mm:893: failed assertion `buffer is not large enough\n'\nzsh: abort      python train.py\n",
            "rank-crashed",
            "certain",
            "SIGABRT",
        ),
        (
            "libc++abi: terminating due to uncaught exception of type std::runtime_error: [METAL] Command buffer execution failed\n"
            "[1]    72864 abort      python train.py\n",
            "rank-crashed",
            "certain",
            "SIGABRT",
        ),
        (
            "libc++abi: terminating with uncaught exception of type gloo::IoException: [gloo/transport/uv/pair.cc:598] "
            "Connection closed by peer [127.0.0.1]:50000\nzsh: abort      python train.py\n",
            "cause-unknown",
            "certain",
            "Connection closed",
        ),
        # A hub that did not answer is no peer; an import that was tried is no cause.
        (
            TRACEBACK.format(
                "requests.exceptions.ConnectTimeout: (Caused by ConnectTimeoutError('timed out. (connect timeout=10)'))"
            ),
            "rank-raised",
            "certain",
            "ConnectTimeout",
        ),
        (
            TRACEBACK.format("ModuleNotFoundError: No module named 'flash_attn'")
            + "\nDuring handling of the above exception, another exception occurred:\n\n"
            + TRACEBACK.format("RuntimeError: mat1 and mat2"),
            "rank-raised",
            "certain",
            "mat1",
        ),
        # Whether the program went on from the first one is in its source, and not in the log. Of
        # one that only says that the group was gone by then nothing is open.
        (
            TRACEBACK.format("KeyError: 'image'")
            + "\nDuring handling of the above exception, another exception occurred:\n\n"
            + TRACEBACK.format("IndexError: target 11 is out of bounds"),
            "rank-raised",
            "likely",
            "KeyError",
        ),
        (
            TRACEBACK.format("KeyError: 'image'")
            + "\nDuring handling of the above exception, another exception occurred:\n\n"
            + TRACEBACK.format("AssertionError: Process group cannot be None"),
            "rank-raised",
            "certain",
            "KeyError",
        ),
    ],
)
def test_what_misled(log: str, code: str, confidence: str, words: str) -> None:
    """Logs that were once told a wrong cause as certain."""
    first, *others = _told(log)
    assert (first.code, first.confidence) == (code, confidence), render.text((first, *others))
    assert words in first.headline
    assert not others or code == "interrupted"


NO_LOCK = (
    "n1:1:2 [0] misc/ibvwrap.cc:262 NCCL WARN Call to {} failed with error Cannot allocate memory\n"
)
IN_ALL_REDUCE = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/a/train.py", line 12, in <module>
[rank0]:     dist.all_reduce(x)
[rank0]: torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/x.cpp:3384, unhandled system error
[rank0]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
[rank0]: Last error:
[rank0]: Call to ibv_create_cq failed with error Cannot allocate memory
"""


@pytest.mark.parametrize(
    "log",
    [
        *map(NO_LOCK.format, ("ibv_create_cq", "ibv_create_qp", "ibv_reg_mr_iova2")),
        "n1:1:2 [5] register_mr_buffers:465 NCCL WARN NET/OFI Unable to register memory (type = 1) for device 0. "
        "RC: 12, Error: Cannot allocate memory\n",
        NO_LOCK.format("ibv_create_cq") + IN_ALL_REDUCE,
        IN_ALL_REDUCE,
        NO_LOCK.format("ibv_reg_mr") + "n1:1:2 [0] NCCL INFO net.cc:9 -> 2\n" * 40,
    ],
)
def test_memory_that_a_network_card_cannot_lock_is_not_the_programs(log: str) -> None:
    """The limit of locked memory was told as the program's lack of memory."""
    report = _told(log)[0]
    assert report.code == "nccl-failed", render.text((report,))
    assert "docker run --ulimit memlock=-1 ..." in [help.command for help in report.help]


@pytest.mark.parametrize(
    "warning", [NO_LOCK.format("ibv_reg_mr"), "n1:1:2 [0] NCCL WARN Call to connect failed\n"]
)
def test_a_warning_of_nccl_after_which_the_job_went_on_is_no_cause(warning: str) -> None:
    """NCCL falls back to sockets where InfiniBand does not work."""
    assert _told(warning + STEPS)[0].code == "cause-unknown"
    # where something failed later, it may be why
    assert _told(warning + STEPS + FAILED.format(1, 7))[0].code != "cause-unknown"


NO_PLUGIN = "n1:7:{} [0] plugin:1067 NCCL WARN NET/OFI aws-ofi-nccl initialization failed\n"
CONNECTED = "n1:7:{} [0] NCCL INFO {}\n"


@pytest.mark.parametrize("began", ["Using network Socket", "comm 0x7 rank 6 - Init COMPLETE"])
@pytest.mark.parametrize("before", ["", "loading\n" * 60])
def test_a_warning_of_nccl_after_which_its_process_was_connected_is_no_cause(
    began: str, before: str
) -> None:
    """NCCL went on without a plugin, and an error of long after was told as its effect."""
    log = before + NO_PLUGIN.format(9) + CONNECTED.format(11, began)
    first, *others = _told(log + FAILED.format(1, 7))
    assert (first.code, others) == ("rank-exited", []), render.text((first, *others))
    # Another process is connected, and this one may not be.
    first, *_ = _told(log.replace("n1:7:9", "n1:8:9"))
    assert first.code == "nccl-failed", render.text((first,))


def test_a_traceback_that_became_one_line_is_read() -> None:
    line = 'Traceback (most recent call last): File "/a/run.py", line 4, in <module> main() File "/a/run.py", line 2, in main {}\n'
    raising = 'raise ValueError("x: y") ValueError: x: y'
    report = _told(line.format(raising))[0]
    assert (report.code, "ValueError: x: y" in report.headline) == ("rank-raised", True)
    command = "CalledProcessError: Command 'python -m train' returned non-zero exit status 3."
    report = _told("AlgorithmError: ExecuteUserScriptError: a " + line.format(command))[0]
    assert report.code == "rank-exited", render.text((report,))


def test_ranks_that_torch_counts_are_missing_only_when_fewer_came() -> None:
    """More than there should be are not missing: others, or those of an earlier attempt, were
    counted as well.
    """
    words = "Timed out initializing process group in store based barrier on rank: 0, for key: store_based_barrier_key:1"
    assert (
        _told(f"RuntimeError: {words} (world_size=4, worker_count=3, timeout=0:01:00)")[0].code
        == "ranks-missing"
    )
    assert (
        _told(f"RuntimeError: {words} (world_size=4, worker_count=16, timeout=0:01:00)")[0].code
        == "cause-unknown"
    )


def test_only_the_ranks_of_one_call_are_said_to_have_waited_in_it() -> None:
    words = "[rank{0}]:[E501 12:10:00 ProcessGroupNCCL.cpp:607] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={1}, "
    words += "OpType={2}, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600042 milliseconds before timing out."
    calls = ((0, 3912, "ALLREDUCE"), (1, 3911, "_ALLGATHER_BASE"), (2, 3912, "ALLREDUCE"))
    first, *_ = _told("\n".join(words.format(*call) for call in calls))
    assert first.headline.startswith("ranks 0 and 2 waited in ALLREDUCE of 1 elements, call 3912")


def test_ray_counts_what_it_did_not_kill_too() -> None:
    words = "(raylet) node_manager.cc:3277: {} Workers (tasks / actors) killed due to memory pressure (OOM), 2 Workers crashed"
    assert _told(words.format(10))[0].code == "rank-out-of-memory"
    assert _told(words.format(0))[0].code == "cause-unknown"


def test_ranks_that_were_in_different_calls_are_named_once() -> None:
    call = "Rank {} is running collective: CollectiveFingerPrint(SequenceNumber=3, OpType={}, TensorShape=[1])"
    lines = [
        f"[rank{one}]: RuntimeError: Detected mismatch between collectives on ranks. {call.format(one, a)}, but {call.format(two, b)}."
        for one, a, two, b in ((0, "ALLREDUCE", 1, "BROADCAST"), (1, "BROADCAST", 0, "ALLREDUCE"))
    ]
    reports = _told("\n".join(lines))
    assert [report.code for report in reports] == ["collective-mismatch"]
    assert reports[0].headline == "rank 0 was in ALLREDUCE, and rank 1 in BROADCAST"


@pytest.mark.parametrize(
    "prefix",
    [
        "trainer-2: ",
        "172.27.221.56: ",
        "[trainer22|6]:",
        "web  | ",
        "10.164.15.249 [0] ",
        "pod/a-0 trainer: ",
        "<3>: ",
        "[1/train/2 (pid 12)] ",
    ],
)
def test_whatever_stands_before_the_frames_of_a_traceback_is_a_prefix(prefix: str) -> None:
    lines = TRACEBACK.format("KeyError: 'lr'").splitlines()
    between = "other:  step 3\n"
    text = "step 1\n" + between.join(f"{prefix}{line}\n" for line in lines)
    report = _told(text)[0]
    assert (report.code, report.confidence) == ("rank-raised", "certain"), render.text((report,))
    assert report.headline.endswith("raised KeyError: 'lr'")
    assert "t.py:4" in report.where
    ranked = _told("".join(f"{prefix}[rank5]: {line}\n" for line in lines))[0]
    assert (ranked.headline, ranked.ranks) == ("rank 5 raised KeyError: 'lr'", (5,))


def test_hosts_that_write_into_one_log_are_told_apart() -> None:
    one = [f"node-1: {line}" for line in TRACEBACK.format("KeyError: 'lr'").splitlines()]
    two = [f"node-2: {line}" for line in TRACEBACK.format("KeyError: 'lr'").splitlines()]
    woven = "\n".join(line for pair in zip(one, two, strict=True) for line in pair)
    assert _told(woven)[0].headline == "node-1 raised KeyError: 'lr'"


def test_a_prefix_with_a_clock_names_nobody() -> None:
    lines = TRACEBACK.format("KeyError: 'lr'").splitlines()
    report = _told("".join(f"<07:00:0{i}> {line}\n" for i, line in enumerate(lines)))[0]
    assert report.headline == "the program raised KeyError: 'lr'"


@pytest.mark.parametrize(
    "prefix",
    [
        "ERROR 2025-01-15T11:03:07.776877384Z [resource.labels.taskName: workerpool0-0] ",
        "ERROR\t2023-05-24 10:11:12 +0000\tworkerpool0-0\t",
        "[2023-01-01, 12:00:00 UTC] {subprocess.py:93} INFO - ",
        "[trace]: 2023-01-01 12:00:00,123: rank0[123][MainThread]: ERROR: ",
        "2023-01-01 12:00:00.123 | ERROR    | __main__:main:10 - ",
        "[NeMo E 2023-01-01 12:00:00 train:10] ",
        "stern-web-0 web ",
        "web\t",
        "| ",
        "[1/1] currentAttempt done. Last Error: USER::",
        "train (3.10)\tRun\t2024-05-01T12:00:00.1234567Z ",
    ],
)
def test_a_prefix_of_any_form_that_a_whole_traceback_has(prefix: str) -> None:
    lines = TRACEBACK.format("KeyError: 'lr'").splitlines()
    report = _told("step 1\n" + "".join(f"{prefix}{line}\n" for line in lines))[0]
    assert (report.code, report.headline) == ("rank-raised", "the program raised KeyError: 'lr'")
    assert "t.py:4" in report.where
    ranked = _told("".join(f"{prefix}[rank5]: {line}\n" for line in lines))[0]
    assert (ranked.headline, ranked.ranks) == ("rank 5 raised KeyError: 'lr'", (5,))


def test_words_that_another_process_wrote_before_a_frame_are_no_prefix() -> None:
    """Two ranks wrote into one another, twice in the same way."""
    torn = '    return f(x)  File "/srv/a.py", line 3, in f\n'
    last = "    return f(x)\nRuntimeError: shapes differ\n"
    first = 'Traceback (most recent call last):\n  File "/srv/t.py", line 1, in g\n'
    report = _told(f"{first}{torn}{torn}{last}")[0]
    assert (report.code, report.headline[-13:]) == ("rank-raised", "shapes differ")


def test_the_ranks_of_a_smaller_group_are_not_those_of_the_job() -> None:
    """NCCL names the rank that speaks first, by its number in the group."""
    words = "ncclInvalidUsage: x.\n{}Last error:\n{}Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 6000\n"
    for speaker, ranks in (("[rank2]: ", (2,)), ("[rank0]: ", (0, 1)), ("", (0, 1))):
        log = f"{speaker}torch.distributed.DistBackendError: NCCL error in: a.cpp:7, invalid usage\n{speaker}"
        report = _told(log + words.format(speaker, speaker))[0]
        assert (report.code, report.ranks) == ("device-shared", ranks)


def test_a_traceback_behind_other_words_in_its_line() -> None:
    glued = TRACEBACK.format("KeyError: 'lr'").splitlines()
    own = (
        "die: error: must run as root[rank5]: "
        + glued[0]
        + "\n"
        + "".join(f"[rank5]: {line}\n" for line in glued[1:])
    )
    assert (report := _told(own)[0]).headline == "rank 5 raised KeyError: 'lr'"
    assert report.ranks == (5,)
    logger = "Scheduler hit an exception: " + "\n".join(glued)
    assert _told(logger)[0].headline == "the program raised KeyError: 'lr'"


def test_a_paste_that_begins_inside_a_traceback() -> None:
    """Its frames say where it was, and the line that names the exception is where it begins."""
    frames = f'  File "/srv/t.py", line 3, in f\n    g()\n  File "{SITE}/distributed_c10d.py", line 9, in barrier\n    work.wait()\n'
    report = _told(frames + "ValueError: x\n")[0]
    assert (report.code, report.confidence, report.logs) == (
        "rank-raised",
        "likely",
        ("train.log:5",),
    )
    assert report.where == "t.py:3 in f (torch barrier)"
    later = "step\n" * 50 + 'see File "/srv/t.py", line 3, in f\n'
    assert _told(later)[0].headline.startswith("nothing in these 51 lines")


@pytest.mark.parametrize(
    ("log", "code", "confidence", "headline"),
    [
        (
            "Process finished with exit code -1073740791 (0xC0000409)\n",
            "rank-crashed",
            "likely",
            "0xC0000409",
        ),
        (
            FAILED.format(3221225477, 7),
            "rank-crashed",
            "certain",
            "local rank 2 crashed with 0xC0000005 (access violation)",
        ),
        (
            "Process finished with exit code -1073741510 (0xC000013A: interrupted by Ctrl+C)\n",
            "interrupted",
            "certain",
            "Ctrl-C",
        ),
        (  # the script goes on without that step
            "slurmstepd: error: execve(): hostname: No such file or directory\n"
            "srun: error: node1: task 0: Exited with exit code 2\n" + "epoch 1 done\n" * 60,
            "start-failed",
            "likely",
            "hostname",
        ),
        (
            "=>> PBS: job killed: walltime 3630 exceeded limit 3600\n",
            "interrupted",
            "certain",
            "PBS stopped the job: its time was over",
        ),
        (
            "TERM_RUNLIMIT: job killed after reaching LSF run time limit.\n",
            "interrupted",
            "certain",
            "LSF stopped the job",
        ),
        (
            "TERM_CPULIMIT: job killed after reaching LSF CPU usage limit.\n",
            "interrupted",
            "certain",
            "LSF stopped the job: its time was over",
        ),
        (
            "TERM_PREEMPT: job killed after preemption.\n",
            "interrupted",
            "certain",
            "stopped the job",
        ),
        (
            "slurmstepd-n04: error: *** STEP 7.0 ON n04 CANCELLED AT 2026-06-11T10:02:10 ***\n",
            "interrupted",
            "certain",
            "Slurm stopped the job; for whom is not in the log",
        ),
        (
            "slurmstepd: error: execve(): ./run.sh: Permission denied\n",
            "start-failed",
            "certain",
            "it is not executable",
        ),
        (
            "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   RANK 3 PID 71 RUNNING AT n4\n=   KILLED BY SIGNAL: 11\n===\n",
            "rank-crashed",
            "certain",
            "rank 3 crashed with SIGSEGV",
        ),
        (
            "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 71 RUNNING AT n4\n=   EXIT CODE: 7\n=   CLEANING UP\n",
            "rank-exited",
            "certain",
            "exited with code 7",
        ),
        (
            "Stalled ops:\nloss [missing ranks: 1, 5]\n",
            "ranks-missing",
            "likely",
            "ranks 1 and 5 have not come to loss",
        ),
        (
            "RuntimeError: No rendezvous handler for http://\n",
            "init-method-invalid",
            "certain",
            "init_method begins with http://",
        ),
        (
            "RuntimeError: DDP expects same model across all ranks, but Rank 3 has 7 params, while rank 0 has inconsistent 5 params.\n",
            "collective-mismatch",
            "certain",
            "rank 3 gave DDP a model of 7 parameters, rank 0 one of 5",
        ),
        (
            "epoch 3\nMemory access fault by GPU node-1 (Agent handle: 0x1) on address (nil).\n",
            "cuda-kernel-failed",
            "certain",
            "node-1",
        ),
        (
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n",
            "rank-out-of-memory",
            "certain",
            "ran out of memory: ray",
        ),
        ("AssertionError: Invalid device id\n", "device-missing", "certain", "Invalid device id"),
        (
            "[proxy:0:0@n01] HYDU_create_process: execvp error on file pythn (No such file or directory)\n",
            "start-failed",
            "certain",
            "pythn",
        ),
        (
            "MPI_ABORT was invoked on rank 2 in communicator X\nwith errorcode 15.\n",
            "rank-exited",
            "certain",
            "rank 2 exited with code 15",
        ),
        (
            "application called MPI_Abort(MPI_COMM_WORLD, 3) - process 2\n",
            "rank-exited",
            "certain",
            "rank 2 exited with code 3",
        ),
        (
            '{"level":"error","msg":"'
            + TRACEBACK.format("KeyError: 3").replace('"', '\\"').replace("\n", "\\n")
            + '"}\n',
            "rank-raised",
            "certain",
            "KeyError: 3",
        ),
        (
            "AssertionError: Default process group is not initialized\n",
            "group-missing",
            "certain",
            "init_process_group",
        ),
        (
            "n1:7:9 [0] NCCL WARN Mismatched collective detected, please check\n",
            "collective-mismatch",
            "certain",
            "do not match",
        ),
        (
            "n1:7:9 [0] init.cc:981 NCCL WARN Invalid rank requested : 2/2\n",
            "rank-out-of-range",
            "certain",
            "the rank 2 for a group of 2",
        ),
        (
            "n1:7:9 [0] bootstrap.cc:40 NCCL WARN Bootstrap : no socket interface found\n",
            "interface-missing",
            "certain",
            "NCCL in the program found no network interface",
        ),
        (
            "2023-Aug-01 16:12:43.0204 3:4 [21] bootstrap.cc:106 CCOM WARN Call to accept failed : Too many open files\n",
            "files-exhausted",
            "certain",
            "Too many open files",
        ),
        (
            "EI0002: The wait execution of the Notify register times out. Reason: "
            "The Notify register has not received the Notify record from remote rank: [24]. base\n",
            "cause-unknown",
            "certain",
            "not received the Notify record from remote rank: [24]",
        ),
        (
            "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 7 RUNNING AT n1\n=   EXIT CODE: 139\n"
            "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Terminated (signal 15)\n",
            "rank-crashed",
            "certain",
            "SIGSEGV",
        ),
        (
            "2: Traceback (most recent call last):\n"
            '2:   File "/a/train.py", line 64, in main\n2:     model = load(path)\n',
            "cause-unknown",
            "certain",
            "line 1 speaks of a failure",
        ),
        (
            "/a/test_x.py:385: in __init__\n    raise ValueError(\nE   ValueError: no backend\n",
            "rank-raised",
            "likely",
            "ValueError: no backend",
        ),
        (
            "RuntimeError: Processes 1 exited with error code 10\n",
            "rank-exited",
            "certain",
            "rank 1 exited with code 10",
        ),
        (
            "AssertionError: False is not true : Expected zero exit code but got -11\n",
            "rank-crashed",
            "certain",
            "SIGSEGV",
        ),
        (
            "Error: failed to run torchrun --nnodes=2 train.py on n2, is localhost: False, "
            "exception: No authentication methods available\n",
            "address-unreachable",
            "certain",
            "n2 could not be reached by ssh",
        ),
        (
            "RuntimeError: synStatus=26 [Generic failure] Device acquire failed.\n",
            "device-busy",
            "likely",
            "did not get its Gaudi",
        ),
        (
            "RuntimeError: x.ts:479 NPU function error: AclrtSynchronizeDeviceWithTimeout, error code is 507048\n"
            "[ERROR] 2025-06-25-10:45:23 (PID:13075, Device:0, RankID:8) ERR00100 PTA call acl api failed\n"
            "EI0002: The wait execution of the Notify register times out.\n",
            "cause-unknown",
            "certain",
            "waited in vain",
        ),
        (
            "Traceback (most recent call last):\n"
            "ray.exceptions.RayTaskError(OutOfMemoryError): ray::f() (pid=3)\n"
            '  File "/a/train.py", line 94, in run\n    trainer.fit()\n',
            "rank-out-of-memory",
            "certain",
            "OutOfMemoryError",
        ),
        (
            "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -6) local_rank: 0 (pid: 2) of binary: python\n"
            'Traceback (most recent call last):\n  File "/l/torch/distributed/elastic/agent/server/api.py", line 906, in _exit_barrier\n'
            "    store_util.barrier(\nRuntimeError: Socket Timeout\n",
            "rank-crashed",
            "likely",
            "local rank 0 crashed with SIGABRT",
        ),
        ("Application 12 exit signals: Killed\n", "rank-killed", "certain", "SIGKILL"),
        (
            "(W pid=4) a.cc:97: Unhandled exception: X. what(): y\n",
            "cause-unknown",
            "certain",
            "this line speaks of a failure",
        ),
        ("srun: PrologSlurmctld failed, job killed\n", "interrupted", "certain", "prolog failure"),
        (
            'Traceback (most recent call last):\n  File "/l/vllm/v1/engine/core.py", line 9, in run\n    f()\nRuntimeError: cancelled\n',
            "cause-unknown",
            "certain",
            "lost another rank",
        ),
        ("RuntimeError: cancelled\n", "rank-raised", "likely", "RuntimeError: cancelled"),
    ],
)
def test_phrases_of_systems(log: str, code: str, confidence: str, headline: str) -> None:
    report = _told(log)[0]
    assert (report.code, report.confidence) == (code, confidence), render.text((report,))
    assert headline in report.headline


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("RuntimeError: CUDA error: an illegal instruction was encountered", "cuda-kernel-failed"),
        (
            "RuntimeError: cuda runtime error (39) : uncorrectable ECC error encountered",
            "cuda-kernel-failed",
        ),
        ("RuntimeError: CUDA error: uncorrectable NVLink error detected", "cuda-kernel-failed"),
        ("RuntimeError: Triton Error [CUDA]: misaligned address", "cuda-kernel-failed"),
        ("CUDA_ERROR_ILLEGAL_ADDRESS: an address", "cuda-kernel-failed"),
        ("HW Exception by GPU node-2 (Agent handle: 0x5) reason :GPU Hang", "cuda-kernel-failed"),
        (
            "callbackQueue aborting with error : HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION",
            "cuda-kernel-failed",
        ),
        ("RuntimeError: NPU out of memory. Tried to allocate 20.00 MiB", "rank-out-of-memory"),
        ("RuntimeError: Triton Error [CUDA]: out of memory", "rank-out-of-memory"),
        (
            "RuntimeError: UR backend failed: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
            "rank-out-of-memory",
        ),
        ("ValueError: No available memory for the cache blocks.", "rank-out-of-memory"),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            "rank-out-of-memory",
        ),
        *(
            (f"[rank1]: {line}: No space left on device (28)", "rank-out-of-memory")
            for line in (
                "RuntimeError: unable to write to file </torch_1234_0>",
                "RuntimeError: unable to resize file </torch_1234_0> to the right size",
                "RuntimeError: unable to open shared memory object </torch_1_2> in read-write mode",
                "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_3>",
            )
        ),
        ("RuntimeError: unable to write to file </torch_1234_0>", "rank-out-of-memory"),
        (
            "OSError: [Errno 28] No space left on device: '/dev/shm/cache/0.npy'",
            "rank-out-of-memory",
        ),
        ("OSError: [Errno 28] No space left on device: '/data/0.npy'", "rank-raised"),
        ("MemoryError", "rank-out-of-memory"),
        ("slurmstepd: error: Exceeded job memory limit at some point.", "rank-out-of-memory"),
        (
            "slurmstepd: error: Step 1.0 exceeded memory limit (9 > 8), being killed",
            "rank-out-of-memory",
        ),
        ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", "rank-out-of-memory"),
        ("=>> PBS: job killed: mem 9kb exceeded limit 8kb", "rank-out-of-memory"),
        (
            "n1:7:9 [0] NCCL WARN Error while creating shared memory segment /dev/shm/nccl-x (size 9), error: No space left on device (28)",
            "rank-out-of-memory",
        ),
        ("RuntimeError: HIP error: invalid device function", "versions-differ"),
        ("/x/flash_attn.so: undefined symbol: _ZN3c104cuda9SetDeviceEi", "versions-differ"),
        ("Failed to initialize NVML: Driver/library version mismatch", "cuda-init-failed"),
        (
            "RuntimeError: [1]: params[0] in this process with sizes [64, 3] appears not to match sizes of the same param in process 0.",
            "collective-mismatch",
        ),
        ("python3: No module named torchrun", "start-failed"),
        (
            'OCI runtime create failed: exec: "torchrun": executable file not found in $PATH: unknown',
            "start-failed",
        ),
        ("free(): invalid pointer", "rank-crashed"),
        ("    free(): double free detected in tcache 2", "rank-crashed"),
        (
            "DDP expects same model across all ranks, but Rank 0 has 16 params, while rank 1 has inconsistent 0 params.",
            "collective-mismatch",
        ),
        (
            "subprocess.CalledProcessError: Command '['/usr/bin/gcc', 'a.c']' returned non-zero exit status 1.",
            "rank-raised",
        ),
        *(
            (f"subprocess.CalledProcessError: Command {command}", code)
            for command, code in (
                ("'['python', 'a.py']' returned non-zero exit status 1.", "rank-exited"),
                (
                    "'['C:\\\\v\\\\python.exe', 'a.py']' returned non-zero exit status 2.",
                    "rank-exited",
                ),
                ("'torchrun a.py' returned non-zero exit status 1.", "rank-exited"),
                ("'['python3.11', 'a.py']' died with <Signals.SIGSEGV: 11>.", "rank-crashed"),
                # Neither is a rank's.
                ("'['aws', 's3', 'ls']' returned non-zero exit status 1.", "rank-raised"),
                ("'sh -c python' returned non-zero exit status 1.", "rank-raised"),
                ("'['pythonify', 'a']' returned non-zero exit status 1.", "rank-raised"),
                ("'['ffmpeg', 'a']' died with <Signals.SIGSEGV: 11>.", "rank-raised"),
            )
        ),
        ("    | ConnectionError: Couldn't reach 'a/b' on the Hub", "rank-raised"),
        ("*** Error in `python': double free or corruption (!prev): 0x00 ***", "rank-crashed"),
        ("corrupted size vs. prev_size", "rank-crashed"),
        ("*** stack smashing detected ***: terminated", "rank-crashed"),
        ("train.py: error: the following arguments are required: --lr", "rank-exited"),
        ("**ValueError: shapes do not match**", "rank-raised"),
        ("RuntimeError: Stop_waiting response is expected", "cause-unknown"),
        ("ray.exceptions.LocalRayletDiedError: the raylet died", "cause-unknown"),
        ("n1:7:9 [0] NCCL WARN Failed to open libibverbs.so[.1]", "cause-unknown"),
        ("^C[mpiexec@n1] Sending Ctrl-C to processes as requested", "interrupted"),
        ("srun: sending Ctrl-C to StepId=7.0", "interrupted"),
        ("The user-provided time limit for job execution has been reached:", "interrupted"),
        ("Job exceeded its walltime limit. Job was aborted", "interrupted"),
        ("Job exceeded its cpu time limit. Job was aborted", "interrupted"),
        ("MOAB_INFO:  job exceeded wallclock limit", "interrupted"),
        (
            "Job exceeded a memory resource limit (vmem, pvmem, etc.). Job was aborted",
            "rank-out-of-memory",
        ),
        (
            "Memory on the node (IP: 10.0.0.1, ID: 1f) where the lease (lease ID: 01, name=x, pid=7, mem",
            "rank-out-of-memory",
        ),
        ("Memory on the node (IP: 10.0.0.1) was 95.1GB / 100.0GB (0.951)", "rank-out-of-memory"),
        (
            "[2026-08-05 07:11:08,188 E 3 3] logging.cc:501: *** SIGSEGV received at time=17 on cpu 1 ***",
            "rank-crashed",
        ),
        ("[12-16 14:27:10] Exit code: -9", "rank-killed"),
        ("ExitCode 137", "rank-killed"),
        (
            "sagemaker.exceptions.UnexpectedStatusException: Error for Training job x: Failed. Reason: AlgorithmError: Exit Code: 139",
            "rank-crashed",
        ),
        ("ExecuteUserScriptError: ", "cause-unknown"),
        (
            "The replica workerpool0-0 exited with a non-zero status of 3. Termination",
            "rank-exited",
        ),
        ("The replica ps 1 exited with a non-zero status of 139. Termination", "rank-crashed"),
        (
            "The replica master 0 ran out-of-memory and exited with a non-zero status of 9(SIGKILL)",
            "rank-out-of-memory",
        ),
        ("ERROR:composer.cli.launcher:Rank 2 crashed with exit code -7.", "rank-crashed"),
        ("ERROR:composer.cli.launcher:Global rank 0 (PID 7) exited with code 3", "rank-exited"),
        (
            "Container rank 0 status failed cmd ['/usr/bin/python3', 'a.py'] code -6 log log/a.0.log",
            "rank-crashed",
        ),
        ("/a/b.py:7: UserWarning: it may fail: CUDA Out of Memory errors", "cause-unknown"),
        (
            "/a/torch/cuda/__init__.py:107: UserWarning: CUDA initialization: Found no NVIDIA driver on your system.",
            "device-missing",
        ),
        ("0s0n9esxgd0u45[error]worker exited with exit code 136", "rank-crashed"),
        ("ERROR: Job 7 failed with return code list: [137, 1, 137]", "rank-exited"),
        ("ERROR: Job 7 failed with return code list: [0, 137]", "rank-killed"),
        ("      Exit Code:    137", "rank-killed"),
        ("exit code: -9", "rank-killed"),
        ("exit code: -1", "cause-unknown"),  # what many programs return for any failure
        ("exit code: -300", "cause-unknown"),
        ("exit status 139", "rank-crashed"),
        ("The actor is dead because its node has died. Node Id: 1f", "node-lost"),
        (
            "The node with node id: 1f and ip: 10.0.0.1 has been marked dead because the detector has missed too many heartbeats from it.",
            "node-lost",
        ),
        ("job preempted (node failure)", "node-lost"),
        (
            "        An attempt has been made to start a new process before the",
            "main-unguarded",
        ),
        (
            "n1:7:9 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-a to 96 bytes",
            "rank-out-of-memory",
        ),
        (
            "n1:7:9 [0] NCCL WARN Error: failed to extend /dev/shm/nccl-a to 96 bytes, error: Operation not permitted (1)",
            "nccl-failed",
        ),
        ("Exception: expected value at line 1 column 1", "rank-raised"),
        (
            "Too many open files. Communication with the workers is no longer possible. Please increase",
            "files-exhausted",
        ),
        # whoever runs a program tells its exit code, or its signal, in much the same words
        ("[x7-n0-0] terminated with exit code (137). Reason [Error]. Message:", "rank-killed"),
        ("container failed with non-zero exit code: 3 (exit code 3)", "rank-exited"),
        ("the web request failed with status 137", "cause-unknown"),
        ("step 3 completed with exit code 0", "cause-unknown"),
        ("error: command 'gcc' failed with exit code 3", "cause-unknown"),
        ("`train (3)` terminated with an error exit status (3) -- it is retried", "cause-unknown"),
        ('  "containerExitCode" : 139,', "rank-crashed"),
        ('  "OOMKilled": false,', "cause-unknown"),
        ("node7.example.com: rank 256 died from signal 11", "rank-crashed"),
        ("Worker process 222 was killed by signal 9", "rank-killed"),
        ("a worker that takes more will be killed by signal 9", "cause-unknown"),
        ('CRITICAL - Process: signal=-9: signal_name="SIGKILL": source="task"', "rank-killed"),
        ("Docker job has gone over memory limit of 1024 Mb", "rank-out-of-memory"),
        ("job 31 exceeded MEM usage hard limit (2528 > 1126)", "rank-out-of-memory"),
        ("The worker may have exceeded K8s pod memory limits.", "cause-unknown"),
        (
            "0.1s: flux-shell[0]: FATAL: task 0: start failed: a.sh: Permission denied",
            "start-failed",
        ),
        ("(b pid=9) I 05-04 00:52:46 controller.py:100] The cluster is preempted.", "interrupted"),
        ("nvidia-container-cli: initialization error: nvml error: driver", "cuda-init-failed"),
        ("UserError: User program failed with SystemExit: 3", "rank-exited"),
    ],
)
def test_words_of_vendors(line: str, code: str) -> None:
    """A line that stands deep in a log counts as one in a paste does."""
    assert _told("epoch\n" * 100 + line + "\n")[0].code == code


@pytest.mark.parametrize(
    "line",
    [
        "Uncorrectable ECC errors: 0",
        "parse(): invalid value, taken as 3",
        "memory pressure is 0.1, killed 0 Workers (tasks / actors)",
        "step 3 | out of memory retries 0",
        "HTTP 200 https://example.org/ ok",
        "ExitCode 0",
        "Exit code: 0",
        "      Exit Code:    0",
        "> a quotation with **bold: words**",
        "    | epoch 3 | loss 0.1",
        "n1:7:9 [0] NCCL INFO NET/Plugin: Failed to find ncclNetPlugin_v9 symbol.",
    ],
)
def test_lines_of_jobs_that_are_well(line: str) -> None:
    report = _told(f"{line}\nepoch 4\n")[0]
    assert (report.code, report.confidence) == ("cause-unknown", "certain"), report.headline
    assert "speaks of a failure" not in report.headline


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("torchrun: command not found", "torchrun"),
        ("bash: line 3: torchrun: command not found", "torchrun"),
        ("/var/spool/slurmd/job12/slurm_script: line 9: torchrun: command not found", "torchrun"),
        ("sh: 1: /opt/env/bin/accelerate: not found", "/opt/env/bin/accelerate"),
        ("/entry.sh: exec: line 3: python3.11: not found", "python3.11"),
        ("zsh: command not found: torchrun", "torchrun"),
        ("/usr/bin/env: 'python': No such file or directory", "python"),
        ("nohup: failed to run command 'torchrun': Permission denied", "torchrun"),
        ("bash: ./train.sh: Permission denied", "./train.sh"),
        ("job.sh: line 4: ./train.sh: No such file or directory", "./train.sh"),
        ("-bash: ./a.sh: /bin/bash^M: bad interpreter: No such file or directory", "./a.sh"),
        ("bash: ./train.sh: cannot execute: required file not found", "./train.sh"),
        (
            "python3: error while loading shared libraries: libpython3.11.so.1.0: cannot open "
            "shared object file: No such file or directory",
            "python3",
        ),
    ],
)
def test_a_program_that_a_shell_does_not_start(line: str, program: str) -> None:
    """One line was the whole log, and said exactly why; no cause was named."""
    for log in (line, "module load cuda\n" * 60 + line + "\n"):
        (report,) = _told(log)
        assert report.code == "start-failed", render.text((report,))
        assert report.headline.startswith(f"{program} cannot be started: ")
    assert _told(line + "\n" + STEPS)[0].code == "cause-unknown"  # the script went on


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("./train.sh: /opt/python: bad interpreter: Permission denied", "head -n 1 ./train.sh"),
        ("bash: ./a.py: /opt: bad interpreter: Permission denied", "head -n 1 ./a.py"),
        ("bash: ./a.py: cannot execute: required file not found", "head -n 1 ./a.py"),
        ("bash: ./train.sh: Permission denied", "chmod +x ./train.sh"),
        ("./train.sh: Permission denied", "chmod +x ./train.sh"),
        ("/usr/bin/env: 'python\\r': No such file or directory", "dos2unix SCRIPT"),
    ],
)
def test_what_helps_a_program_that_a_shell_does_not_start(line: str, command: str) -> None:
    """`chmod +x` was shown for a script that was executable: its interpreter was not."""
    (report,) = _told(line)
    assert [help.command.partition(" |")[0] for help in report.help] == [command]


@pytest.mark.parametrize(
    "line",
    [
        "bash: line 1: nvidia-smi: command not found",
        "job.sh: line 5: /etc/profile.d/modules.sh: No such file or directory",
        "bash: line 3: /logs/out.txt: Permission denied",
        "cat: config.py: No such file or directory",
    ],
)
def test_a_shell_that_goes_on_has_started_nothing_in_vain(line: str) -> None:
    assert _told(line)[0].code == "cause-unknown"


REFUSED = (
    ("srun: error: Unable to create step for job 7: More processors requested than permitted", "srun did not start the job: More"),
    ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "sbatch did not start the job: Requested"),
    ("salloc: error: Job submit/allocate failed: Invalid qos specification", "salloc did not start the job: Invalid qos"),
    ("srun: error: task 0 launch failed: Unspecified error", "srun did not start the job: Unspecified error"),
    ("srun: unrecognized option '--container-image'", "srun did not start the job: unrecognized option"),
    ("mpirun was unable to launch the specified application as it could not find an executable:", "mpirun did not start the job: it could not find"),
    ("qsub: Unknown queue MSG=cannot locate queue", "qsub did not start the job: Unknown queue"),
    ("There are not enough slots available in the system to satisfy the 8\nslots that were requested", "mpirun did not start the job: 8 processes"),
    ("There are not enough slots available in the system to satisfy the 8 slots\nthat were requested", "mpirun did not start the job: 8 processes"),
    ("mpirun has detected an attempt to run as root.", "mpirun did not start the job: it does not run as root"),
    ("      Reason:       ImagePullBackOff", "Kubernetes did not start the container: ImagePullBackOff"),
    ("      Reason:       CreateContainerConfigError", "Kubernetes did not start the container: CreateContainerConfigError"),
    ('docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].', "docker did not start the container: "),
    ("FATAL:   could not open image /data/train.sif: no such file or directory", "Apptainer did not start the container: could not open"),
    ("slurmstepd: error: pyxis:     [ERROR] URL https://r.example/auth returned error code: 401 Unauthorized", "pyxis did not start the container: "),
    ("slurmstepd-n1: error: pyxis: couldn't start container", "pyxis did not start the container: "),
    ("ssh: connect to host node2 port 22: No route to host", "ssh did not reach node2: No route"),
    ("root@node2: Permission denied (publickey,password).", "ssh could not log in: "),
    ("Host key verification failed.", "ssh did not connect: "),
)  # fmt: skip


@pytest.mark.parametrize(("line", "headline"), REFUSED)
def test_a_job_whose_processes_nobody_started(line: str, headline: str) -> None:
    """The line said why, and the report said that its words name no cause that is known."""
    for log in (line, "module load cuda\n" * 60 + line + "\n"):
        report = _told(log)[0]
        assert (report.code, report.confidence) == ("start-failed", "certain"), report.headline
        assert report.headline.startswith(headline)
    # it was started later; mpirun's own paragraph has thirty lines
    assert _told(line + "\n" + 2 * STEPS)[0].code == "cause-unknown"
    raised = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    f()\nValueError: a\n'
    assert [one.code for one in _told(f"{line}\n{raised}")] == ["rank-raised"]


@pytest.mark.parametrize(
    "line",
    [
        # The step had been started, and had ended.
        "srun: error: Unable to create step for job 7: Job/step already completing or completed",
        # What runs beside a job: it may be started again, removed or fetched.
        "train-0   0/1   ErrImagePull   0   1m\ntrain-0   1/1   Running   0   5m",
        "Error response from daemon: No such container: old-train",
        "git@github.com: Permission denied (publickey).",
        # Every interactive job of PBS says so.
        "qsub: waiting for job 130.pbs to start\nqsub: job 130.pbs ready",
        "qsub: job 130.pbs completed",
        # Kubernetes may have started it after these: they tell of a moment that is over.
        "  Warning  Failed  20s  kubelet  Error: ErrImagePull",
        "  Warning  FailedScheduling  2m  default-scheduler  0/4 nodes are available: 4 Insufficient cpu.",
    ],
)
def test_what_is_no_refusal_to_start(line: str) -> None:
    assert _told(line)[0].code == "cause-unknown"


def test_the_time_limit_of_pbs_stands_behind_a_prompt() -> None:
    (report,) = _told(
        "u@n1:~$ =>> PBS: job killed: walltime 7230 exceeded limit 7200\nlogout\nqsub: job 130.pbs completed\n"
    )
    assert report.headline == "PBS stopped the job: its time was over"


def test_cuda_in_a_child_of_mp_spawn_that_may_have_been_forked() -> None:
    """notebook_launcher forks; the report said that CUDA cannot be started here."""
    (report,) = _told(
        "torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 0 terminated with the following error:\n"
        "Traceback (most recent call last):\n"
        '  File "/opt/venv/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 90, in _wrap\n    fn(i, *args)\n'
        '  File "/opt/venv/lib/python3.11/site-packages/torch/cuda/__init__.py", line 529, in set_device\n'
        "    torch._C._cuda_setDevice(device)\nRuntimeError: CUDA error: initialization error\n"
    )
    assert (report.code, report.confidence, report.ranks) == ("cuda-before-fork", "likely", (0,))


SHELL = "bash: line 1: ./setup.sh: Permission denied\n"
TORCHRUN_ENDS = "E0302 11:21:02 22345 torch/api.py:874] failed (exitcode: {}) local_rank: 0 (pid: 22401) of binary: python\n"
TIME_LIMIT = (
    "slurmstepd: error: *** JOB 11 ON n1 CANCELLED AT 2026-03-02T11:21:02 DUE TO TIME LIMIT ***\n"
)


@pytest.mark.parametrize(
    ("log", "code"),
    [
        (SHELL + TORCHRUN_ENDS.format(3), "rank-exited"),
        (SHELL + TORCHRUN_ENDS.format(-9), "rank-killed"),
        (SHELL + "Segmentation fault (core dumped)\n", "rank-crashed"),
        (SHELL + "srun: error: node1: task 3: Out Of Memory\n", "rank-out-of-memory"),
        (SHELL + TIME_LIMIT, "interrupted"),
        (
            SHELL + "[rank1]:[E302 11:00:00.000 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=17, OpType=ALLREDUCE, NumelIn=1024, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.\n",
            "cause-unknown",
        ),
        ("nvidia-smi: error while loading shared libraries: libnvidia-ml.so.1: cannot open it\n" + TORCHRUN_ENDS.format(3), "rank-exited"),
        ("-bash: /etc/profile.d/mpi-selector.sh: Permission denied\n", "cause-unknown"),
        ("ssh: connect to host node3 port 22: Connection refused\nstep 1\n" + TORCHRUN_ENDS.format(1), "rank-exited"),
        (
            "root@node2: Permission denied (publickey).\nstep 1\n"
            "RuntimeError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:825, unhandled system error, NCCL version 2.14.3\n",
            "nccl-failed",
        ),
        # A program beside the job tries again and again.
        (("loss 0.1\n" * 6 + "./monitor.sh: line 3: python: command not found\n") * 9, "cause-unknown"),
    ],
)  # fmt: skip
def test_a_job_that_ran_did_not_fail_for_what_its_script_did_not_start(log: str, code: str) -> None:
    """A line of the script's shell hid what ended the job."""
    assert [one.code for one in _told(log)] == [code]


@pytest.mark.parametrize(
    ("line", "headline"),
    [
        ("Segmentation fault", "crashed with SIGSEGV"),
        ("zsh: killed     python train.py", "was killed by SIGKILL"),
        ("zsh: segmentation fault (core dumped)  python train.py", "crashed with SIGSEGV"),
        ("zsh: illegal hardware instruction  python train.py", "crashed with SIGILL"),
        ("zsh: trace trap  python train.py", "crashed with SIGTRAP"),
        ("zsh: abort      python train.py", "crashed with SIGABRT"),
        ("[1]  + 27943 segmentation fault (core dumped)  python train.py", "crashed with SIGSEGV"),
        ("[1]    27943 killed     python train.py", "was killed by SIGKILL"),
        ("[1]  + 27943 exit 3     python train.py", "exited with code 3"),
        ("[1]+  Killed                  nohup python train.py", "was killed by SIGKILL"),
        ("[1]+  Segmentation fault      (core dumped) python train.py", "crashed with SIGSEGV"),
        ("[1]+  Exit 3                  python train.py", "exited with code 3"),
        ("fish: Job 1, 'python train.py' terminated by signal SIGKILL (Forced quit)", "was killed by SIGKILL"),
        # macOS
        ("Bus error: 10", "crashed with SIGBUS"),
        ("run.sh: line 3: 12345 Killed: 9               python train.py", "was killed by SIGKILL"),
        ("run.sh: line 3: 12345 Abort trap: 6           python train.py", "crashed with SIGABRT"),
    ],
)  # fmt: skip
def test_the_word_of_any_shell_for_the_end_is_read_wherever_it_stands(
    line: str, headline: str
) -> None:
    """Only bash's words on Linux were known, and some of them in the first 40 lines alone."""
    (report,) = _told("loss 0.1\n" * 60 + line + "\n")
    assert report.headline == f"the program {headline}"


def test_another_job_of_a_shell_that_ended_is_no_certain_cause() -> None:
    line = "[1]+  Exit 1                  tensorboard --logdir runs\n"
    (report,) = _told(line + "".join(f"step {number}: loss 0.1\n" for number in range(60)))
    assert report.confidence == "likely"


@pytest.mark.parametrize(
    "line",
    [
        "[1]+  Done                    python train.py",
        "[1]  + 27943 done       python train.py",
        "[1] 27943",
        "Killed: 3",
        "[1]+  Running                 nohup python train.py &",
        "SystemExit: 0",
    ],
)
def test_a_job_of_a_shell_that_ended_well_did_not_fail(line: str) -> None:
    (report,) = _told("loss 0.1\n" + line + "\n")
    assert report.code == "cause-unknown"
    assert "nothing in these 2 lines says that something failed" in report.headline


@pytest.mark.parametrize(
    "log",
    [
        SHELL + "srun: error: node1: task 0: Exited with exit code 126\n",
        # This one ended the others.
        SHELL + "srun: error: node1: task 0: Exited with exit code 126\nsrun: error: node2: task 1: Killed\n",
        SHELL + "[rank0]: Traceback (most recent call last):\n[rank0]:   File \"/w/a.py\", line 3, in <module>\n[rank0]:     start()\n"
        "[rank0]: torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.\n",
        # Whoever waited for it stopped the job, or the script ended by a code of its own.
        "bash: line 1: torchrun: command not found\n" + TIME_LIMIT,
        "slurmstepd: error: execve(): python3: No such file or directory\n" + TIME_LIMIT,
        "/app/run.sh: 3: deepspeed: not found\ncommand terminated with exit code 1\n",
        SHELL + "srun: error: node1: task 0: Exited with exit code 1\n",
        "bash: line 1: torchrun: command not found\n[rank0]: Traceback (most recent call last):\n[rank0]:   File \"/w/a.py\", line 3, in <module>\n"
        "[rank0]:     start()\n[rank0]: torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.\n"
        + TORCHRUN_ENDS.format(1),
        "r.sh: line 1: exec: torchrun: not found\n",
        "r.sh: 1: exec: torchrun: not found\n",
        "zsh: no such file or directory: ./run.sh\n",
        "zsh: ./run.sh: bad interpreter: /bin/bashx: no such file or directory\n",
        "bash: /opt/conda/bin/python: cannot execute binary file: Exec format error\n",
        "bash: torchrun: command not found...\n",
        "node2: bash: torchrun: command not found\n",
    ],
)  # fmt: skip
def test_a_rank_that_a_shell_did_not_start(log: str) -> None:
    assert _told(log)[0].code == "start-failed"


NAMELESS = 'Traceback (most recent call last):\n  File "/w/t.py", line 1, in <module>\n    f()\nValueError: bad shard 7\n'


@pytest.mark.parametrize(
    ("tasks", "ranks"),
    [("tasks 0-7: Exited with exit code 1", ()), ("task 2: Exited with exit code 1\nsrun: error: n1: tasks 0-1,3: Exited with exit code 1", (2,))],
)  # fmt: skip
def test_an_error_without_a_name_is_not_that_of_all_tasks_in_a_list(
    tasks: str, ranks: tuple[int, ...]
) -> None:
    """One raises, and the others end with 1 as they lose it: all of them were told to have raised it."""
    report = _told(f"{NAMELESS}srun: error: n1: {tasks}\n")[0]
    assert (report.code, report.ranks) == ("rank-raised", ranks)


def test_an_ignored_exception_in_one_line_is_no_cause() -> None:
    joined = 'Traceback (most recent call last):   File "/a/b.py", line 3, in __del__     x() AttributeError: x is None'
    assert (
        _told(f"Exception ignored in: <function X.__del__>\n{joined}\n")[0].code == "cause-unknown"
    )


def test_a_number_of_a_signal_is_no_exit_code_of_mpich() -> None:
    bar = "=" * 80
    (report,) = _told(
        f"{bar}\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 1 RUNNING AT n1\n=   EXIT CODE: 9\n"
        f"=   CLEANING UP REMAINING PROCESSES\n{bar}\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Terminated (signal 15)\n"
    )
    assert report.code == "rank-killed"


def test_a_class_of_the_program_with_the_name_of_sagemakers() -> None:
    raised = NAMELESS.replace("ValueError: bad shard 7", "AlgorithmError: did not converge")
    (report,) = _told(raised)
    assert (report.code, report.confidence) == ("rank-raised", "certain")


def test_a_row_of_a_table_is_no_exception() -> None:
    assert _told("| ValueError: x | 3 |\n")[0].code != "rank-raised"


def test_a_traceback_in_one_line_of_many_frames_is_read_at_once() -> None:
    line = 'Traceback (most recent call last):   File "/a/b.py"' + ", line 1, in x" * 30_000
    assert _told(line + " ValueError: bad shard\n")


RANK_TERMINATED = (
    "W0302 11:21:02 22345 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 22402 closing signal SIGTERM\n"
    + TORCHRUN_ENDS.format(-15)
)
EXITED = "srun: error: gpu-a01: task 0: Exited with exit code 1\n"
STEP_ENDED = "slurmstepd: error: *** STEP 4321.0 ON gpu-a01 CANCELLED AT 2026-03-02T11:21:02 ***\n"


@pytest.mark.parametrize(
    ("log", "code", "words"),
    [
        (RANK_TERMINATED + STEP_ENDED, "interrupted", "Slurm stopped the job"),
        (RANK_TERMINATED + TIME_LIMIT, "interrupted", "its time was over"),
        (EXITED + STEP_ENDED + RANK_TERMINATED, "rank-exited", "rank 0 exited with code 1"),
        # It was ended alone, and Slurm's stop is what follows from it.
        (RANK_TERMINATED + EXITED + STEP_ENDED, "rank-killed", "killed by SIGTERM"),
    ],
)
def test_a_rank_that_got_the_sigterm_of_a_stopped_job(log: str, code: str, words: str) -> None:
    """It was told as killed by somebody who is not in the log."""
    report = _told(log)[0]
    assert (report.code, words in report.headline) == (code, True), report.headline


TERMINATING = "srun: Terminating StepId=4321.0\n"
ABORTED_STEP = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
FORCED = "srun: forcing job termination\n"
KILLED_TASKS = "srun: error: gpu-a01: tasks 1-3: Killed\n"
KILLED_TASK = "srun: error: gpu-a01: task 0: Killed\n"
MPI_ABORTED = "application called MPI_Abort(MPI_COMM_WORLD, 1) - process 0\n"
FOR_A_TASK = STEP_ENDED.replace(" ***\n", " DUE TO TASK FAILURE ***\n")


@pytest.mark.parametrize(
    ("log", "code", "ranks"),
    [
        (EXITED + TERMINATING + STEP_ENDED + KILLED_TASKS, "rank-exited", (0,)),
        (EXITED + TERMINATING + FOR_A_TASK + KILLED_TASKS, "rank-exited", (0,)),
        (EXITED + TERMINATING + KILLED_TASKS, "rank-exited", (0,)),
        (EXITED + STEP_ENDED + KILLED_TASKS, "rank-exited", (0,)),
        (EXITED.replace("Exited with exit code 1", "Segmentation fault") + TERMINATING + KILLED_TASKS, "rank-crashed", (0,)),
        (MPI_ABORTED + ABORTED_STEP + STEP_ENDED + KILLED_TASKS, "rank-exited", (0,)),
        ("In: PMI_Abort(16, N/A)\n" + ABORTED_STEP + STEP_ENDED + KILLED_TASKS, "rank-exited", ()),
        (EXITED + "srun: First task exited 60s ago\n" + TERMINATING + STEP_ENDED + KILLED_TASKS, "rank-exited", (0,)),
        # Srun ended the step for these.
        (KILLED_TASKS + TERMINATING + STEP_ENDED + EXITED, "rank-killed", (1, 2, 3)),
        (KILLED_TASKS + TERMINATING + STEP_ENDED + KILLED_TASK, "rank-killed", (1, 2, 3)),
        (KILLED_TASKS, "rank-killed", (1, 2, 3)),
        # A later step of the same script
        (EXITED + TERMINATING + STEP_ENDED + "epoch 1\n" * 20 + KILLED_TASKS, "rank-killed", (1, 2, 3)),
        (KILLED_TASKS.replace("Killed", "Exited with exit code 3"), "rank-exited", (1, 2, 3)),
    ],
)  # fmt: skip
def test_a_task_that_srun_killed_after_the_first_failure(
    log: str, code: str, ranks: tuple[int, ...]
) -> None:
    """It was told as the cause, certain, and the failure before it as what followed from it."""
    (report,) = _told(log)
    assert (report.code, report.ranks) == (code, ranks), render.text((report,))
    assert ("ranks 1-3 were stopped" in report.then) == (1 not in ranks)


def test_the_first_killed_task_of_a_step_that_slurm_ended_for_a_task() -> None:
    """Only the stop was told, though the words say that a task failed."""
    rest = KILLED_TASKS.replace("Killed", "Terminated")
    (report,) = _told(FOR_A_TASK + KILLED_TASK + rest)
    assert (report.code, report.ranks, report.confidence) == ("rank-killed", (0,), "likely")


@pytest.mark.parametrize(
    ("stop", "codes"),
    [
        (ABORTED_STEP, ["rank-killed"]),
        (TERMINATING, ["rank-killed"]),
        (STEP_ENDED, ["interrupted", "rank-killed"]),
    ],
)
def test_a_kill_in_a_later_step_is_no_part_of_an_earlier_stop(stop: str, codes: list[str]) -> None:
    """The kill was taken for one by the stop, and only the stop was told, as certain."""
    log = stop + "+ srun python train.py\nepoch 1\nepoch 2\nepoch 3\n" + KILLED_TASK
    told = [(report.code, report.confidence) for report in _told(log)]
    assert told == [(code, "likely") for code in codes]


@pytest.mark.parametrize("stop", [ABORTED_STEP, TERMINATING])
@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (MPI_ABORTED, "rank-exited"),
        (EXITED.replace("code 1", "code 137"), "rank-killed"),
        (EXITED, "rank-exited"),
        ("Traceback (most recent call last):\n  File \"/a/train.py\", line 3, in <module>\n    f()\nValueError: no\n" + EXITED, "rank-raised"),
    ],
)  # fmt: skip
def test_a_failure_that_stands_after_sruns_word_of_the_end(
    stop: str, failure: str, code: str
) -> None:
    """Srun writes by itself, and what a task wrote comes later: the stop was told as the cause."""
    assert [report.code for report in _told("epoch 1\n" + stop + failure)] == [code]


@pytest.mark.parametrize(
    "end",
    [
        "salloc: Relinquishing job allocation 65\nsalloc: Job allocation 65 has been revoked.\n",
        TERMINATING,
    ],
)
def test_what_slurm_says_at_every_end_is_no_stop(end: str) -> None:
    (report,) = _told("salloc: Granted job allocation 65\nepoch 1\nTraining finished\n" + end)
    assert (report.code, "nothing in these" in report.headline) == ("cause-unknown", True)


def test_a_kill_for_memory_that_slurm_names_after_it_stopped_the_step() -> None:
    """The stop stood first, and the kill as what followed from it."""
    killed = "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.0 cgroup.\n"
    tasks = "srun: error: n1: task 3: Out Of Memory\n"
    (report,) = _told(ABORTED_STEP + killed + tasks)
    assert (report.code, report.ranks) == ("rank-out-of-memory", (3,))


def test_each_rank_has_the_signal_that_torchrun_tells_of_it() -> None:
    """Both were told as ended by SIGTERM, which one of them outlived."""
    row = "[{0}]:\n  time      : 2026-03-02_11:21:{1}\n  rank      : {0} (local_rank: {0})\n  exitcode  : {2} (pid: 2240{0})\n"
    line = "-" * 60 + "\n"
    (report,) = _told(
        "=" * 60 + "\ntrain.py FAILED\n" + line + "Failures:\n" + row.format(1, 40, -9) + line
        + "Root Cause (first observed failure):\n" + row.format(0, 10, -15) + "=" * 60 + "\n"
    )  # fmt: skip
    assert report.headline == "ranks 0-1 ended with SIGKILL or SIGTERM; the cause is not known"


def test_a_pid_is_no_rank() -> None:
    (report,) = _told("epoch 1\nProcess 48213 exited with error code 1\n")
    assert (report.code, report.ranks) == ("rank-exited", ())
    of_torch = "RuntimeError: Process 1 exited with error code 10 and exception:\n"
    assert _told(of_torch)[0].ranks == (1,)


NOT_CONNECTED = "n1:33:55 [0] misc/socket.cc:500 NCCL WARN socketStartConnect: Connect to 10.0.0.2<41> failed : Software caused connection abort\n"


@pytest.mark.parametrize(
    "log",
    [
        NOT_CONNECTED + "n1:33:55 [0] NCCL INFO Using network Socket\nstep 1\n" + NOT_CONNECTED,
        "step 1\n" + NOT_CONNECTED + "n1:33:77 [0] NCCL INFO comm 0x2 rank 0 nranks 4 cudaDev 0 Init COMPLETE\n",
    ],
    ids=["again", "another communicator"],
)  # fmt: skip
def test_a_warning_of_nccl_that_nothing_took_back(log: str) -> None:
    """It was passed over, and no cause was known."""
    assert _told(log)[0].code == "nccl-failed"


@pytest.mark.parametrize("crash", ["Segmentation fault", "Bus error"])
def test_a_crash_after_a_stop_is_not_certain_to_be_the_cause(crash: str) -> None:
    """A dump takes its time: it may have come first."""
    crashed = KILLED_TASK.replace("task 0: Killed", f"task 2: {crash}")
    for log, sure in (
        (EXITED + TERMINATING + STEP_ENDED + crashed, "likely"),
        (crashed + TERMINATING + STEP_ENDED + EXITED, "certain"),
    ):
        (report,) = _told(log)
        assert (report.code, report.ranks, report.confidence) == ("rank-crashed", (2,), sure)


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        (FOR_A_TASK.replace("TASK FAILURE", "TIME LIMIT"), "Slurm stopped the job: its time was over"),
        ("salloc: Job 4321 has exceeded its time limit and its allocation has been revoked.\n" + FORCED, "Slurm stopped the job: its time was over"),
        ("salloc: Job allocation 4321 has been revoked.\n" + FORCED, "Slurm stopped the job; for whom is not in the log"),
        ("^Csrun: sending Ctrl-C to StepId=4321.0\n" + FORCED, "the job was stopped by Ctrl-C"),
        ("srun: First task exited 60s ago\n" + TERMINATING, "srun ended the job: a rank had left, and the others went on for too long"),
        ("", "Slurm stopped the job; for whom is not in the log"),
    ],
)  # fmt: skip
def test_a_task_that_a_stop_killed_is_no_second_cause(stop: str, words: str) -> None:
    (report,) = _told(stop + ABORTED_STEP + STEP_ENDED + KILLED_TASK)
    assert (report.code, report.headline) == ("interrupted", words)


@pytest.mark.parametrize(
    "stopped",
    [
        "W0302 11:21:02 22345 torch/api.py:900] Sending process 22402 closing signal SIGTERM\n",
        "[2026-01-01 10:00:00,000] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 502\n",
    ],
)
def test_a_child_of_a_rank_that_tells_of_the_sigterm_of_its_launcher(stopped: str) -> None:
    """absl tells of the signal in any process of the job; it was the cause."""
    died = (
        "*** SIGTERM received by PID 22477 (TID 22477) on cpu 3 from PID 22402; stack trace: ***\n"
    )
    assert _told(stopped + died + TORCHRUN_ENDS.format(1))[0].code == "rank-exited"


WATCHDOG = (
    "[rank{0}]:[E302 11:00:00.000 ProcessGroupNCCL.cpp:632] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=17, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.\n"
)


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (TORCHRUN_ENDS.format(1), TORCHRUN_ENDS.format(1).replace("22401", "22501")),
        (WATCHDOG.format(0), WATCHDOG.format(1)),
    ],
)
def test_the_words_before_a_failure_are_those_of_its_attempt(first: str, last: str) -> None:
    """The report of the last attempt quoted the first one's."""
    again = "I0302 11:21:02 22345 torch/api.py:900] [default] Worker group FAILED. 1/1 attempts left; will restart worker group\n"
    log = f"license server not reachable\n{first}{again}dataset /data/shard-0017 is empty\n{last}"
    report = _told(log)[0]
    said = [line for one in report.said for line in one.lines]
    assert "dataset /data/shard-0017 is empty" in said
    assert "license server not reachable" not in said


def test_a_launcher_that_starts_several_processes_has_other_ranks() -> None:
    report = _told(
        "subprocess.CalledProcessError: Command '['/opt/bin/python', '-u', 'train.py', '--local_rank=3']' "
        "returned non-zero exit status 1.\n"
    )[0]
    assert (report.code, report.confidence) == ("rank-exited", "likely")


def test_a_node_failure_without_a_name_stands_first() -> None:
    """What torchrun said of the stop that followed was the cause."""
    stopped = "W0302 11:21:03 22345 torch/distributed/elastic/agent/server/api.py:741] Received Signals.SIGTERM death signal, shutting down workers\n"
    (report,) = _told(CANCELLED + stopped)
    assert report.headline == "Slurm stopped the job: node failure"


NODE_FAILED = "srun: error: Node failure on {}\n"
CANCELLED = "slurmstepd: error: *** STEP 123.0 ON node1 CANCELLED AT 2026-11-27T10:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n"


@pytest.mark.parametrize(
    ("log", "node", "command"),
    [
        (NODE_FAILED.format("node7") + CANCELLED, "node7", "sbatch --exclude=node7"),
        (CANCELLED + NODE_FAILED.format("node7"), "node7", "sbatch --exclude=node7"),
        (NODE_FAILED.format("gpu[3-4]"), "gpu[3-4]", "sbatch --exclude='gpu[3-4]'"),
    ],
)
def test_the_node_that_slurm_lost_is_named(log: str, node: str, command: str) -> None:
    """The node stood in the log and not in the report; the step's end names that of its first task."""
    (report,) = _told(log)
    assert report.code == "interrupted"
    assert node in report.headline
    assert [help.command for help in report.help] == [command]


def test_an_exception_that_is_the_whole_log_and_indented() -> None:
    report = _told("    RuntimeError: shape mismatch: [7, 256]\n")[0]
    assert (report.code, report.headline[-8:]) == ("rank-raised", "[7, 256]")


def test_what_argparse_said_stands_in_the_headline() -> None:
    report = _told(
        "usage: a.py [-h] --lr LR\na.py: error: argument --lr: invalid float value: 'x'\n"
    )[0]
    assert report.headline.endswith("exited with code 2: argument --lr: invalid float value: 'x'")


@pytest.mark.parametrize(
    ("logs", "commands"),
    [
        ("/state/runs/a b/rank1.log:7", ["rallypoint show '/state/runs/a b'"]),
        ("/state/runs/a1", ["rallypoint show /state/runs/a1"]),
        ("node7:/state/runs/a1/rank1.log:7", []),  # of another machine
        ("/builds/p/train.log:40", []),  # by `rallypoint explain train.log`
    ],
)
def test_a_report_of_ours_in_a_log_leads_to_its_own_run(logs: str, commands: list[str]) -> None:
    """The newest run, which `show` alone shows, was often another one."""
    log = "[1] epoch 1\n\nerror[rank-raised]: rank 1 raised ValueError: x\n\n  where  a.py:3\n\n"
    (report,) = _told(f"{log}  logs   {logs}\n  more   rallypoint explain rank-raised\n")
    assert [help.command for help in report.help] == commands


LEFT_UNDER_TORCHRUN = """\
could not find the config /cfg/a.yaml
{lost}E1128 02:34:03.479000 19243 torch/distributed/elastic/api.py:1002] failed (exitcode: {code}) local_rank: 1 (pid: 19617) of binary: python
Root Cause (first observed failure):
[0]:
  time      : 2026-11-28_02:34:03
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 19617)
  error_file: <N/A>
"""


@pytest.mark.parametrize("others", [1, 3])
def test_words_without_a_name_before_the_tracebacks_of_others(others: int) -> None:
    """`sys.exit("words")` leaves a line without a prefix under torchrun, and the ranks that lost
    this one wrote more than what is shown of a log.
    """
    frames = [f'  File "a.py", line {i}, in f\n    step()\n' for i in range(6)]
    lost = (
        "Traceback (most recent call last):\n"
        + "".join(frames)
        + "RuntimeError: Connection closed by peer [127.0.0.1]:61841\n"
    )
    named = "".join(
        f"[rank{rank}]: {line}\n" for rank in range(2, 2 + others) for line in lost.splitlines()
    )
    report = _told(LEFT_UNDER_TORCHRUN.format(lost=named, code=1))[0]
    assert (report.code, report.confidence) == ("rank-exited", "likely")
    assert report.said[0].lines == ("could not find the config /cfg/a.yaml",)


def test_words_without_a_name_where_no_launcher_tells_of_the_end() -> None:
    """A shell's loop starts the ranks, and waits for all of them."""
    frame = '  File "a.py", line 8, in step\n    dist.all_reduce(t)'
    lost = f"Traceback (most recent call last):\n{frame}\nRuntimeError: Connection closed by peer [127.0.0.1]:61841"
    named = "".join(f"[rank{i}]: {line}\n" for i in (0, 2) for line in lost.splitlines())
    report = _told(f"step 3 loss 0.2\nno checkpoint in /ckpt\n{named}")[0]
    assert report.code == "cause-unknown"
    assert report.said[-1].lines == ("step 3 loss 0.2", "no checkpoint in /ckpt")


def test_words_without_a_name_before_an_exit_that_became_an_abort() -> None:
    abort = "terminate called without an active exception\n"
    report = _told(LEFT_UNDER_TORCHRUN.format(lost=abort, code=-6))[0]
    assert report.code == "rank-crashed"
    assert report.said[-1].lines == ("could not find the config /cfg/a.yaml",)


@pytest.mark.parametrize("stopped", [19616, 19617])
def test_a_rank_that_got_sigterm_before_the_launcher_stopped_the_others(stopped: int) -> None:
    """torchrun names it as the first that failed, and it is not among those that it stopped."""
    stop = f"W1128 02:34:03.3 19243 torch/distributed/elastic/api.py:1028] Sending process {stopped} closing signal SIGTERM\n"
    report = _told(LEFT_UNDER_TORCHRUN.format(lost=stop, code=-15))[0]
    assert (report.code == "rank-killed") == (stopped != 19617)


ONE_UNDER_ACCELERATE = """\
starting
{words}Traceback (most recent call last):
  File "/env/bin/accelerate", line 8, in <module>
    sys.exit(main())
  File "/env/lib/python3.11/site-packages/accelerate/commands/launch.py", line 1234, in launch_command
    simple_launcher(args)
  File "/env/lib/python3.11/site-packages/accelerate/commands/launch.py", line 800, in simple_launcher
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['/env/bin/python', 'one.py', 'exit']' returned non-zero exit status {code}.
"""


def test_the_only_process_of_a_launcher_has_no_other_rank_to_lose() -> None:
    log = ONE_UNDER_ACCELERATE.format(words="no checkpoint in /ckpt\n", code=1)
    report = _told(log)[0]
    assert report.code == "rank-exited"
    assert "rank" not in report.why
    assert report.said[0].lines == ("starting", "no checkpoint in /ckpt")


def test_what_argparse_said_under_a_launcher_is_the_same_end() -> None:
    words = "usage: a.py [-h] [--lr LR]\na.py: error: argument --lr: invalid float value: 'x'\n"
    report = _told(ONE_UNDER_ACCELERATE.format(words=words, code=2))[0]
    assert report.headline.endswith("argument --lr: invalid float value: 'x'")
    assert "other ranks" not in report.why


def test_what_argparse_said_in_all_ranks_of_torchrun() -> None:
    words = "usage: a.py [-h] --lr LR\na.py: error: the following arguments are required: --lr\n"
    report = _told(2 * words + LEFT_UNDER_TORCHRUN.format(lost="", code=2))[0]
    assert (
        report.headline == "rank 1 exited with code 2: the following arguments are required: --lr"
    )
    assert words.splitlines()[1] in report.said[0].lines


def _group(*members: str, prefix: str = "", closed: bool = True) -> str:
    """The traceback of an exception group, as Python 3.11 and later show it. A member that begins with
    a blank is a group of its own.
    """
    lines = [
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "/app/train.py", line 9, in main',
        "  |     async with asyncio.TaskGroup() as tg:",
        f"  | ExceptionGroup: unhandled errors ({len(members)} sub-exception{'s' * (len(members) > 1)})",
    ]
    for number, member in enumerate(members, 1):
        lines.append(
            f"{'  +-' if number == 1 else '    '}+---------------- {number} ----------------"
        )
        if member.startswith(" "):
            lines += [f"  {line}".replace("  + ", "| ") for line in member.splitlines()]
            continue
        lines += [
            "    | Traceback (most recent call last):",
            f'    |   File "/app/train.py", line {number}, in task',
            f"    |     step({number})",
            *f"    | {member}".split("\n"),
        ]
    lines += ["    +" + 36 * "-"] * closed
    return "".join(f"{prefix}{line}\n" for line in lines)


RESET = "ConnectionResetError: [Errno 104] Connection reset by peer"
FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."


def _raised(log: str) -> list[tuple[str, str]]:
    """What the reports of a log say was raised, and where."""
    return [(one.headline.partition(" raised ")[2], one.where) for one in _told(log)]


@pytest.mark.parametrize("prefix", ["", "| ", "[rank1]: "])
@pytest.mark.parametrize("after", ["", "epoch 7\n"])
def test_of_an_exception_group_each_member_is_told(prefix: str, after: str) -> None:
    """One member was told as the exception, and the others were in no part of the report."""
    of = ", rank 1" * ("rank1" in prefix)
    log = _group("ValueError: bad batch", "KeyError: 'lr'", prefix=prefix) + after
    assert _raised(log) == [
        ("ValueError: bad batch", f"train.py:1 in task{of}"),
        ("KeyError: 'lr'", f"train.py:2 in task{of}"),
    ]


def test_an_exception_group_of_one_is_its_member() -> None:
    assert _raised(_group("ValueError: bad batch")) == [
        ("ValueError: bad batch", "train.py:1 in task")
    ]


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_the_members_of_a_group_in_a_group_are_told(prefix: str) -> None:
    """Of a group in a group of one the first member was told alone."""
    inner = _group("ValueError: bad batch", "KeyError: 'lr'")
    told = ["ValueError: bad batch", "KeyError: 'lr'"]
    assert [kind for kind, _ in _raised(_group(inner, prefix=prefix))] == told
    both = _group(inner, "TypeError: no tensor", prefix=prefix)
    assert [kind for kind, _ in _raised(both)] == [*told, "TypeError: no tensor"]


def test_members_of_one_cause_are_one_report_with_their_line() -> None:
    """The place was the line that waited for the members."""
    (report,) = _told(_group(FULL, FULL))
    assert (report.code, report.where) == ("rank-out-of-memory", "train.py:1 in task")


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_a_member_that_speaks_of_a_peer_does_not_make_the_others_consequences(prefix: str) -> None:
    """The words of one member made the whole group a consequence."""
    for members in (("ValueError: bad batch", RESET), (RESET, "ValueError: bad batch")):
        (report,) = _told(_group(*members, prefix=prefix))
        assert report.headline.endswith("raised ValueError: bad batch")
    lost = _told(_group(RESET, RESET, prefix=prefix))[0]
    assert lost.code == "cause-unknown"


def test_what_members_raised_is_attributed_as_one() -> None:
    """To the rank that failed by the launcher's word."""
    log = _group("ValueError: bad batch", RESET, "KeyError: 'lr'")
    reports = _told(log + LEFT_UNDER_TORCHRUN.format(lost="", code=1))
    assert [report.ranks for report in reports] == [(1,), (1,)]
    assert not any("does not name" in report.then for report in reports)


def test_a_group_in_the_table_of_torchrun() -> None:
    """The error file of `@record` has the group; its words are nowhere else with `--redirects`."""
    field = _group("ValueError: bad batch", "KeyError: 'lr'").replace("\n", "\n  ")
    table = LEFT_UNDER_TORCHRUN.format(lost="", code=1) + f"  traceback : {field}\n{60 * '='}\n"
    first, second = _told(table)
    assert (first.headline, first.ranks) == ("rank 1 raised ValueError: bad batch", (1,))
    assert (second.headline, second.ranks) == ("rank 1 raised KeyError: 'lr'", (1,))


def test_a_group_is_at_its_end_where_its_bars_are() -> None:
    """Python closes groups inside each other by one line. The reader waited for one more, and what
    followed was lost: the steps of a program that had handled the group, the next traceback, and
    the words of Slurm.
    """
    handled = _group(_group("ValueError: bad batch", "KeyError: 'lr'"))
    steps = "".join(f"Epoch: {number}\n" for number in range(30))
    last = 'Traceback (most recent call last):\n  File "t.py", line 4, in f\n    g()\n'
    (report,) = _told(handled + steps + last + "ZeroDivisionError: division by zero\n")
    assert report.headline.endswith("raised ZeroDivisionError: division by zero")
    assert report.where == "t.py:4 in f"
    told = _told(handled + "srun: error: node1: task 3: Out Of Memory\n")
    assert [report.code for report in told] == [
        "rank-raised",
        "rank-raised",
        "rank-out-of-memory",
    ]


@pytest.mark.parametrize("at", range(4, 10))
@pytest.mark.parametrize("stray", ["step 2 loss 2.2", "Epoch: 7", "ERROR"])
def test_lines_of_others_inside_a_group(at: int, stray: str) -> None:
    """One line of another process ended the group: the group itself was told, and its member had
    no place.
    """
    lines = _group("ValueError: bad batch").splitlines()
    log = "\n".join([*lines[:at], stray, *lines[at:]])
    assert _raised(log) == [("ValueError: bad batch", "train.py:1 in task")]


def test_a_member_whose_message_has_several_lines() -> None:
    """Python puts no bar before the second one."""
    words = "RuntimeError: NCCL error in: NCCLUtils.cpp:77, system error\nncclSystemError: x\nLast error:\nno space left"
    report = _told(_group(words, RESET, prefix="[rank1]: "))[0]
    assert report.code == "nccl-failed"
    assert "no space left" in report.headline


def test_members_that_were_never_raised() -> None:
    lines = _group("ValueError: bad batch", "KeyError: 'lr'").splitlines()
    bare = [line for line in lines if not re.match(r"    \|(?! \w+Error)", line)]
    assert [kind for kind, _ in _raised("\n".join(bare))] == [
        "ValueError: bad batch",
        "KeyError: 'lr'",
    ]


def test_a_group_that_was_cut_is_told_itself() -> None:
    lines = _group("ValueError: bad batch").splitlines()
    for end in (4, 5, 6):
        assert _raised("\n".join(lines[:end])) == [
            ("ExceptionGroup: unhandled errors (1 sub-exception)", "train.py:9 in main")
        ]


def test_a_member_alone_is_told_behind_its_bars() -> None:
    """A paste may begin inside a group."""
    lines = _group("ValueError: bad batch", "KeyError: 'lr'").splitlines()
    assert [kind for kind, _ in _raised("\n".join(lines[5:]))] == [
        "ValueError: bad batch",
        "KeyError: 'lr'",
    ]


def test_a_group_below_another_exception() -> None:
    """mp.spawn names the rank in the line above; of `raise ... from` both are told."""
    above = 'Traceback (most recent call last):\n  File "/app/t.py", line 4, in f\n    g()\n'
    group = _group("ValueError: bad batch")
    because = "\nThe above exception was the direct cause of the following exception:\n\n"
    told = _raised(f"{above}KeyError: 'lr'\n{because}{group}")
    assert told == [
        ("KeyError: 'lr'", "t.py:4 in f"),
        ("ValueError: bad batch", "train.py:1 in task"),
    ]
    spawned = "torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 1 terminated with the following error:\n"
    (report,) = _told(above + spawned + group)
    assert (report.headline, report.ranks) == ("rank 1 raised ValueError: bad batch", (1,))


def test_a_group_of_a_worker_of_a_loader() -> None:
    above = (
        'Traceback (most recent call last):\n  File "/app/t.py", line 4, in f\n    next(loader)\n'
    )
    caught = "ExceptionGroup: Caught ExceptionGroup in DataLoader worker process 0.\nOriginal "
    told = _raised(above + caught + _group("ValueError: bad batch"))
    assert told == [("ValueError: bad batch", "train.py:1 in task")]


def test_errors_beyond_those_that_are_told_are_counted() -> None:
    members = [f"{kind}Error: bad" for kind in ("Value", "Key", "Type", "Index", "Name")]
    *_, last = _told(_group(*members))
    assert last.then.startswith("2 more failed")


def test_what_follows_an_exception_group_is_read() -> None:
    log = _group("ValueError: bad batch", "KeyError: 'lr'", prefix="[rank0]: ")
    other = TRACEBACK.format("RuntimeError: mat1 and mat2").splitlines()
    told = _raised(log + "".join(f"[rank1]: {line}\n" for line in other))
    assert [kind for kind, _ in told] == [
        "ValueError: bad batch",
        "KeyError: 'lr'",
        "RuntimeError: mat1 and mat2",
    ]


def test_a_level_below_frames_is_no_exception() -> None:
    """Below the frames of a traceback that was cut, vLLM's next line began with its level alone."""
    log = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    run()\nERROR\n'
    assert _told(log)[0].code == "cause-unknown"


def test_a_traceback_that_is_cut_after_the_line_that_raises() -> None:
    log = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    raise ValueError("bad shapes")\n'
    report = _told(log)[0]
    assert (report.code, report.headline) == (
        "rank-raised",
        "the program raised ValueError: bad shapes",
    )


WORKER = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    for batch in loader:
RuntimeError: Caught RuntimeError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/opt/py/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 99, in _worker_loop
    samples = collate_fn([dataset[i] for i in batch_indices])
RuntimeError: CUDA error: initialization error
"""
CHILD = """Process Process-1:
Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/process.py", line 314, in _bootstrap
    self.run()
  File "train.py", line 5, in work
    torch.zeros(1, device="cuda")
RuntimeError: CUDA error: initialization error
"""
GATHERED = """torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([1, 3, 5])
Traceback (most recent call last): (RANK 1)
  File "/srv/save.py", line 4, in save
    write()
OSError: [Errno 28] No space left on device: '/ckpt/1'
Traceback (most recent call last): (RANK 3)
  File "/srv/save.py", line 4, in save
    write()
OSError: [Errno 28] No space left on device: '/ckpt/1'
Traceback (most recent call last): (RANK 5)
  File "/srv/save.py", line 7, in save
    check()
ValueError: bad
"""


@pytest.mark.parametrize(
    ("log", "code", "confidence", "words"),
    [
        # CUDA's own word for a fork, where a fork is what made the process.
        (WORKER, "cuda-before-fork", "certain", "forked"),
        (CHILD, "cuda-before-fork", "likely", "multiprocessing"),
        (
            CHILD.replace("multiprocessing/process", "multiprocessing/spawn"),
            "cuda-init-failed",
            "certain",
            "CUDA could not be started",
        ),
        (
            TRACEBACK.format("RuntimeError: CUDA error: initialization error"),
            "cuda-init-failed",
            "certain",
            "CUDA could not be started",
        ),
        # A library that misses a name: whose version is wrong is told where one of the two is
        # torch.
        (
            TRACEBACK.format(
                "ImportError: /opt/p/torch/lib/libtorch_cpu.so: undefined symbol: iJIT_NotifyEvent"
            ),
            "versions-differ",
            "certain",
            "libtorch_cpu.so misses iJIT_NotifyEvent: a library that was loaded",
        ),
        (
            TRACEBACK.format(
                "ImportError: /opt/p/flash_attn_2_cuda.cpython-311.so: undefined symbol: _ZN3c104cuda9SetDeviceEi"
            ),
            "versions-differ",
            "certain",
            "it was built for another torch",
        ),
        (
            TRACEBACK.format(
                "ImportError: /opt/p/shop.cpython-311.so: undefined symbol: shoes_count"
            ),
            "rank-raised",
            "likely",
            "shoes_count",
        ),
        # What torch.distributed.checkpoint gathers: those whose error it is, and not all who raise
        # it.
        (GATHERED, "rank-raised", "certain", "ranks 1 and 3 raised OSError"),
        # ssh's word, and that of who had called it.
        (
            "pdsh@head: node9: ssh exited with exit code 255\nssh: Could not resolve hostname node9: Name or service not known\n",
            "address-unresolved",
            "certain",
            "node9 has no address",
        ),
        (
            "ssh: Could not resolve hostname node9: Name or service not known\n" + "step\n" * 40,
            "address-unresolved",
            "likely",
            "node9",
        ),
        (
            TRACEBACK.format(
                "ValueError: Error initializing torch.distributed using tcp:// rendezvous: port number missing"
            ),
            "init-method-invalid",
            "certain",
            "names no port",
        ),
        (
            TRACEBACK.format(
                "RuntimeError: [enforce fail at ../gloo/transport/tcp/address.cc:45] sizeof(impl_) == bytes.size(). 136 vs 272"
            ),
            "world-size-differs",
            "likely",
            "another world_size",
        ),
    ],
)
def test_words_with_the_place_that_they_left(
    log: str, code: str, confidence: str, words: str
) -> None:
    report = _told(log)[0]
    assert (report.code, report.confidence) == (code, confidence), render.text((report,))
    assert words in report.headline


def test_what_failed_in_a_checkpoint_has_the_programs_line() -> None:
    """The part of the rank that failed begins in torch, which all ranks had called."""
    site = "/x/site-packages/torch/distributed/checkpoint"
    log = f"""\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/srv/train.py", line 9, in save
[rank0]:     dcp.save(state, checkpoint_id=path)
[rank0]:   File "{site}/utils.py", line 263, in all_reduce
[rank0]:     raise final_result
[rank0]: torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([1])
[rank0]: Traceback (most recent call last): (RANK 1)
[rank0]:   File "{site}/utils.py", line 241, in all_reduce
[rank0]:     local_data = map_fun()
[rank0]:   File "{site}/filesystem.py", line 706, in write_data
[rank0]:     return self._write_data(planner, file_queue)
[rank0]: OSError: [Errno 28] No space left on device
"""
    (report,) = _told(log)
    assert report.ranks == (1,)
    assert report.where == "train.py:9 in save (torch all_reduce), rank 1"


IN_CALL = """\
[rank{0}]: Traceback (most recent call last):
[rank{0}]:   File "/tmp/train.py", line {1}, in <module>
[rank{0}]:     dist.{2}()
[rank{0}]:   File "/x/site-packages/torch/distributed/distributed_c10d.py", line 5356, in {2}
[rank{0}]:     work.wait()
[rank{0}]: RuntimeError: [/third_party/gloo/gloo/transport/tcp/{3}
"""
TIMED_OUT = "unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"
CLOSED = "pair.cc:553] Connection closed by peer [127.0.0.1]:13985."
ENDED_WITH_1 = (
    "E1127 20:41:04.479000 14545 torch/distributed/elastic/multiprocessing/api.py:1002] "
    "failed (exitcode: 1) local_rank: 0 (pid: 14562) of binary: /x/bin/python\n"
)


def test_ranks_that_left_different_collectives() -> None:
    """Both tracebacks stood in the log, and the help was to look for the logs of other ranks."""
    differ = IN_CALL.format(1, 6, "barrier", TIMED_OUT) + ENDED_WITH_1
    differ += IN_CALL.format(0, 5, "all_reduce", TIMED_OUT)
    (report,) = _told(differ)
    assert (report.code, report.confidence) == ("collective-mismatch", "likely")
    assert all(at in line for at, line in zip(("py:5", "py:6"), report.evidence, strict=True))
    hurt = differ.replace(TIMED_OUT, CLOSED, 1)  # the first that gave up is lost by the other
    assert _told(hurt)[0].code == "collective-mismatch"


@pytest.mark.parametrize(
    "log",
    [
        # another rank may be the one that was waited for
        IN_CALL.format(1, 6, "barrier", TIMED_OUT)
        + IN_CALL.format(0, 5, "all_reduce", TIMED_OUT)
        + "[rank2]: step 5\n",
        IN_CALL.format(1, 6, "barrier", TIMED_OUT) + IN_CALL.format(0, 6, "barrier", TIMED_OUT),
        # nobody waited: a third one is gone
        IN_CALL.format(1, 6, "barrier", CLOSED) + IN_CALL.format(0, 5, "all_reduce", CLOSED),
    ],
)
def test_ranks_that_were_hurt_in_collectives_by_somebody_else(log: str) -> None:
    assert _told(log)[0].code == "cause-unknown"


def test_a_rank_that_torchrun_does_not_list_may_have_left_early() -> None:
    """Rank 1 had ended with exit code 0, and the help was to look for the cause in its log."""
    log = IN_CALL.format(0, 9, "barrier", CLOSED)
    left = "rallypoint explain rank-left-early"
    (report,) = _told(log + ENDED_WITH_1)
    assert (report.code, left in [help.command for help in report.help]) == ("cause-unknown", True)
    (report,) = _told(log)
    assert (report.code, left in [help.command for help in report.help]) == ("cause-unknown", False)


IN_THREAD = """\
Exception in thread Thread-1 (feed):
Traceback (most recent call last):
  File "/usr/lib/python3.11/threading.py", line 982, in run
    self._target(*self._args, **self._kwargs)
  File "/tmp/train.py", line 4, in feed
    raise ValueError("bad shard 7")
ValueError: bad shard 7
"""
IN_PROCESS = IN_THREAD.replace("Exception in thread Thread-1 (feed):", "Process Process-1:")
ROW = """\
[{0}]:
  time      : 2026-11-27_23:06:14
  host      : localhost
  rank      : {0} (local_rank: {0})
  exitcode  : {1} (pid: 2745{0})
  error_file: <N/A>
  traceback : {2}
"""
FAILURES = "Failures:\n{}-----\nRoot Cause (first observed failure):\n{}=====\n"
TO_ENABLE = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
STOPPED = ROW.format(1, "-15", "Signal 15 (SIGTERM) received by PID 27451")


@pytest.mark.parametrize(
    ("code", "later", "told"),
    [
        (1, "23:06:45", "rank-exited"),
        (
            1,
            "Unable to shutdown process 27450 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL",
            "rank-exited",
        ),
        (-6, "23:06:44", "rank-crashed"),
        (-11, "23:06:43", "rank-crashed"),
        # Before torchrun sends SIGKILL somebody else has.
        (1, "23:06:42", "rank-killed"),
        (1, "", "rank-killed"),
    ],
)
def test_a_rank_that_torchrun_killed_half_a_minute_after_the_first(
    code: int, later: str, told: str
) -> None:
    """It was told as the cause of what had come before it."""
    killed = ROW.format(0, "-9", "Signal 9 (SIGKILL) received by PID 27450")
    last = killed.replace("23:06:14", later)
    words = f"W0301 11:20:31 22345 torch/api.py:900] {later}\n"
    report = _told(words + FAILURES.format(last, ROW.format(1, code, TO_ENABLE)))[0]
    assert (report.code, report.ranks) == (told, (int(told != "rank-killed"),))
    assert ("rank 0 was stopped" in report.then) == (told != "rank-killed")


@pytest.mark.parametrize(("code", "told"), [(-6, "rank-crashed"), (7, "rank-exited")])
def test_an_end_before_the_exit_barrier_of_the_agent_in_vain(code: int, told: str) -> None:
    """The agent waits there for the other nodes when its own ranks have ended: that alone was
    told.
    """
    ended = f"ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: {code}) local_rank: 0 (pid: 27450) of binary: python\n"
    waited = (
        "ERROR:torch.distributed.elastic.agent.server.api:Error waiting on exit barrier. Elapsed: 309.2 seconds\n"
        "Traceback (most recent call last):\n"
        '  File "/opt/py/lib/python3.9/site-packages/torch/distributed/elastic/agent/server/api.py", line 906, in _exit_barrier\n'
        "    store_util.barrier(\n"
        '  File "/opt/py/lib/python3.9/site-packages/torch/distributed/elastic/utils/store.py", line 31, in get_all\n'
        '    data = store.get(f"{prefix}{idx}")\n'
        "RuntimeError: Socket Timeout\n"
    )
    (report,) = _told(ended + waited)
    assert (report.code, report.logs) == (told, ("train.log:1",))
    assert _told(waited)[0].code == "cause-unknown"


def test_a_rank_of_which_two_tell_is_one() -> None:
    killed = "[0]<stderr>:Killed\nProcess 0 exit with status code 137.\n"
    assert _told(killed)[0].headline == "rank 0 was killed by SIGKILL"


@pytest.mark.parametrize("nameless", [IN_THREAD, IN_PROCESS])
def test_what_a_thread_or_a_child_of_a_rank_raised_is_not_given_to_other_ranks(
    nameless: str,
) -> None:
    """It was told, certain, that the two ranks raised it which waited for rank 1 until the timeout,
    and that rank 1 was not at fault. torch names the rank only in what ends the rank.
    """
    hurt = "".join(IN_CALL.format(rank, 9, "all_reduce", TIMED_OUT) for rank in (0, 2))
    ends = (STOPPED + ROW.format(2, 1, TO_ENABLE), ROW.format(0, 1, TO_ENABLE))
    for log in (nameless + hurt, hurt + nameless, nameless + hurt + FAILURES.format(*ends)):
        (report,) = _told(log)
        told = (report.code, report.ranks, report.confidence)
        assert told == ("rank-raised", (), "likely"), render.text((report,))
        assert "bad shard 7" in report.headline
        assert "not at fault" not in report.then
    assert "rank 1 has none" in report.why
    # A rank that ended by itself, and of which the log has nothing else, raised it.
    ended = FAILURES.format(ROW.format(0, 1, TO_ENABLE), ROW.format(1, 1, TO_ENABLE))
    (report,) = _told(nameless + hurt + ended)
    assert (report.ranks, report.confidence) == ((1,), "certain")


def test_of_errors_that_name_no_rank_the_first_to_end_has_the_one_that_is_a_cause() -> None:
    """As in tracebacks of older versions of torch: both ranks were told to have raised it."""
    raised = TRACEBACK.format("ValueError: bad loss")
    lost = IN_CALL.format(0, 9, "all_reduce", CLOSED).replace("[rank0]: ", "")
    ends = FAILURES.format(ROW.format(0, 1, TO_ENABLE), ROW.format(1, 1, TO_ENABLE))
    (one,) = _told(raised + lost + ends)
    assert (one.ranks, one.confidence) == ((1,), "likely")  # both ended in one second
    (both,) = _told(raised + ends)
    assert (both.ranks, both.confidence) == ((0, 1), "certain")
    (one,) = _told(raised + lost + FAILURES.format("", ROW.format(1, 1, TO_ENABLE)))
    assert (one.ranks, one.confidence) == ((1,), "certain")


SAVING = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/opt/py/lib/python3.11/site-packages/torch/serialization.py", line 1003, in save
[rank0]:     _save(
[rank0]:   File "/opt/py/lib/python3.11/site-packages/torch/serialization.py", line 1312, in _save
[rank0]:     zip_file.write_record(name, storage, num_bytes)
[rank0]: {}
"""
CLOSING = """
[rank0]: During handling of the above exception, another exception occurred:

[rank0]: Traceback (most recent call last):
[rank0]:   File "/srv/train.py", line 8, in <module>
[rank0]:     torch.save(model, path)
[rank0]:   File "/opt/py/lib/python3.11/site-packages/torch/serialization.py", line 1002, in save
[rank0]:     with _open_zipfile_writer(f) as opened_zipfile:
[rank0]:   File "/opt/py/lib/python3.11/site-packages/torch/serialization.py", line 834, in __exit__
[rank0]:     self.file_like.write_end_of_file()
[rank0]: RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 640 vs 534
"""
WRITER = "RuntimeError: [enforce fail at inline_container.cc:{}] . {} failed writing {}"


@pytest.mark.parametrize(
    ("log", "confidence"),
    [
        *((SAVING.format(words) + CLOSING, "likely") for words in (
            "RuntimeError: basic_ios::clear: iostream error",
            "OSError: [Errno 28] No space left on device",
            WRITER.format(445, "PytorchStreamWriter", "file data/5: file write failed"),
            WRITER.format(778, "PytorchStreamWriter", "central directory: file write failed"),
        )),
        (WRITER.format(471, "PyTorchStreamWriter", "file data/3: file write failed"), "likely"),
        ("RuntimeError: [enforce fail at inline_container.cc:274] . unexpected pos 384 vs 278", "likely"),
        (
            "terminate called after throwing an instance of 'c10::Error'\n"
            "  what():  [enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0\n",
            "likely",
        ),
        *((words, "certain") for words in (
            "OSError: [Errno 28] No space left on device: '/ckpt/last.pt'",
            "OSError: [Errno 122] Disk quota exceeded",
            "OSError: [Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device",
            "OSError: Not enough free space to write 33554432 bytes after offset 128",
            "OSError: 8388608 requested and 1523680 written",
            "RuntimeError: write(): fd 3 failed with No space left on device",
            "safetensors_rust.SafetensorError: Error while serializing: "
            "I/O error: No space left on device (os error 28)",
            "safetensors_rust.SafetensorError: Error while serializing: "
            'IoError(Os { code: 122, kind: FilesystemQuotaExceeded, message: "Disk quota exceeded" })',
            "sqlite3.OperationalError: database or disk is full",
        )),
        # What it was raised from says more.
        (
            TRACEBACK.format("OSError: [Errno 122] Disk quota exceeded")
            + "\nThe above exception was the direct cause of the following exception:\n\n"
            + TRACEBACK.format("RuntimeError: saving failed"),
            "certain",
        ),
    ],
)  # fmt: skip
def test_a_write_that_failed_says_where_to_look_for_room(log: str, confidence: str) -> None:
    """Of a full disk it was told that the words spoke of other ranks, or nothing at all."""
    (report,) = _told(log)
    assert (report.code, report.confidence) == ("rank-raised", confidence), render.text((report,))
    assert report.help[0].command == "df -h"
    assert "full" in report.why
    assert "saving failed" not in report.headline
    if CLOSING in log:  # the first traceback begins in torch, which caught it
        assert report.where == "train.py:8 in <module> (torch save), rank 0"
        bare = (log.replace("[rank0]: ", "")).splitlines()
        error = tracebacks.exception_in(bare)
        assert error is not None
        assert [frame.function for frame in error.frames] == ["<module>", "save", "_save"]


@pytest.mark.parametrize(
    "log",
    [
        "OSError: [Errno 28] inotify watch limit reached",
        "OSError: [Errno 28] No space left on device: inotify watch on '/srv/data'",
        "OSError: inotify_add_watch: No space left on device",
        "RuntimeError: Tensor shape: 3 requested and 2 written to the buffer",
        "RuntimeError: basic_ios::clear: iostream error",  # of any library, and of any file
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "RuntimeError: [enforce fail at inline_container.cc:747] . open file failed with strerror: Is a directory",
    ],
)
def test_what_is_no_failed_write(log: str) -> None:
    (report,) = _told(log)
    assert (report.code, report.help) == ("rank-raised", ()), render.text((report,))
    assert "other ranks" not in report.why


CALLED = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/tmp/train.py", line 8, in <module>
[rank1]:     subprocess.run([sys.executable, "tile.py"], check=True)
[rank1]:   File "/usr/lib/python3.11/subprocess.py", line 571, in run
[rank1]:     raise CalledProcessError(retcode, process.args,
[rank1]: subprocess.CalledProcessError: Command '['/x/bin/python', 'tile.py']' {}
"""


STARTED = """\
Traceback (most recent call last):
  File "{}", line 325, in main
    raise subprocess.CalledProcessError(returncode=code, cmd=cmd)
subprocess.CalledProcessError: Command '[{}]' {}.
"""
SEGV, KILL = "died with <Signals.SIGSEGV: 11>", "died with <Signals.SIGKILL: 9>"
NUMACTL = "'/usr/bin/numactl', '-C', '0-31', '-m', '0', '/opt/py/bin/python', '-u', 'train.py'"


@pytest.mark.parametrize("command", [NUMACTL, "'./train.sh', '--lr', '1e-4'", "'python', 'a.py'"])
@pytest.mark.parametrize(
    "file",
    [
        "/opt/py/accelerate/commands/launch.py",
        "/opt/py/deepspeed/launcher/launch.py",
        "/opt/py/torch/distributed/launch.py",
    ],
)
def test_what_a_launcher_started_is_known_by_where_it_raises(file: str, command: str) -> None:
    (report,) = _told("step 1\n" + STARTED.format(file, command, SEGV))
    assert report.code == "rank-crashed", render.text((report,))
    (report,) = _told("step 1\n" + STARTED.format(file, command, KILL))
    assert report.code == "rank-killed"
    exited = STARTED.format(file, command, "returned non-zero exit status 1")
    (report,) = _told("[rank0]: KeyError: 'k'\n" + exited)
    assert (report.code, report.ranks, report.confidence) == ("rank-raised", (0,), "certain")


def test_a_tool_around_python_is_known_by_the_command_alone() -> None:
    last = STARTED.format("", NUMACTL, SEGV).splitlines()[-1]
    assert _told(last)[0].code == "rank-crashed"
    other = _told(STARTED.format("/srv/tile.py", "'./tile.sh', 'python'", SEGV))[0]
    assert other.code == "rank-raised"  # of the program's own


@pytest.mark.parametrize(
    "ended", ["returned non-zero exit status 3.", "died with <Signals.SIGKILL: 9>."]
)
def test_a_process_that_a_rank_called_is_not_the_rank(ended: str) -> None:
    """It was told that the rank had exited with code 3, by the word of its launcher, certain."""
    for log in (CALLED, CALLED + IN_CALL.format(0, 9, "all_reduce", CLOSED) + ENDED_WITH_1):
        (report,) = _told(log.format(ended))
        assert (report.code, report.ranks, report.confidence) == ("rank-raised", (1,), "likely")
        assert ended in report.headline


LISTEN = (
    "The server socket has failed to listen on any local network address. "
    "port: 29517, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)


@pytest.mark.parametrize(
    ("log", "command"),
    [
        (f"torch.distributed.DistNetworkError: {LISTEN}\n", "--master-port"),
        (
            "Traceback (most recent call last):\n"
            '  File "/x/site-packages/torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py", line 67, in next_rendezvous\n'
            "    self._store = TCPStore(  # type: ignore[call-arg]\n"
            f"torch.distributed.DistNetworkError: {LISTEN}\n",
            "--master-port",
        ),
        (
            "Traceback (most recent call last):\n"
            '  File "/tmp/serve.py", line 3, in <module>\n'
            '    socket.create_server(("", 29517))\n'
            "OSError: [Errno 98] Address already in use (while attempting to bind on address ('', 29517))\n",
            "getsockname",
        ),
    ],
)
def test_a_port_is_chosen_where_it_was_named(log: str, command: str) -> None:
    """Who had started torchrun twice was told to ask the socket for its port, and had no socket."""
    report = _told(log)[0]
    assert report.code == "port-in-use"
    commands = " ".join(help.command for help in report.help)
    assert [one for one in ("--master-port", "getsockname") if one in commands] == [command]


def test_members_of_a_group_are_counted() -> None:
    """As many as the group has, and some twice; two attempts of all are no such thing, and neither
    are two that are still few.
    """
    line = "initializing ddp: GLOBAL_RANK: {}, MEMBER: 1/4\n"
    report = _told("step\n" * 60 + "".join(line.format(rank) for rank in (0, 1, 0, 1)))[0]
    assert (report.code, report.ranks, report.confidence, report.logs) == (
        "rank-duplicate",
        (0, 1),
        "likely",
        ("train.log:61",),
    )
    assert (
        _told("".join(line.format(rank) for rank in (0, 1, 2, 3, 0, 1, 2, 3)))[0].code
        == "cause-unknown"
    )
    assert _told("".join(line.format(rank) for rank in (0, 1, 0)))[0].code == "cause-unknown"


def test_a_killed_loader_that_a_library_swallowed_is_one_cause() -> None:
    """torch's handler of SIGCHLD raised inside an import of torch's own, which logs it, and the
    rank fails for want of its batch.
    """
    dataloader, prefix = (
        "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py",
        "[rank1]:W1122 23:55:12.4 26339 profiler.py:772] ",
    )
    swallowed = (
        "Unexpected error importing torch.profiler._cupti_monitor\nTraceback (most recent call last):\n"
        '  File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/signal_handling.py", line 78, in handler\n'
        "    _error_if_any_worker_fails()\nRuntimeError: DataLoader worker (pid 26400) is killed by signal: Killed. \n"
    )
    raised = (
        'Traceback (most recent call last):\n  File "/home/ada/train.py", line 20, in <module>\n    for batch in loader:\n'
        f'  File "{dataloader}", line 1316, in _try_get_data\n    raise RuntimeError(\n'
        "RuntimeError: DataLoader worker (pid(s) {}) exited unexpectedly\n"
    )
    log = "".join(prefix + line for line in swallowed.splitlines(keepends=True))
    (report,) = _told(log + raised.format("26400"))
    assert report.headline == "a DataLoader worker of rank 1 was killed by SIGKILL"
    reports = _told(log + raised.format("26401"))
    assert [each.code for each in reports] == ["rank-killed", "rank-raised"]


NUMPYS_NOTICE = """\
A module that was compiled using NumPy 1.x cannot be run in
NumPy 2.0.1 as it may crash. To support both 1.x and 2.x

Traceback (most recent call last):  File "/srv/train.py", line 1, in <module>
    import torch
  File "/opt/py/lib/python3.11/site-packages/torch/__init__.py", line 1382, in <module>
    from .functional import *  # noqa: F403
"""


@pytest.mark.parametrize(
    "between", ["", "torch/nn/x.py:20: UserWarning: no _ARRAY_API\n" + "step 1\n"]
)
@pytest.mark.parametrize("before", ["", "step 0\n" * 50])
def test_where_numpy_was_imported_is_no_exception(before: str, between: str) -> None:
    """NumPy shows its notice with a stack in the form of a traceback, and the program goes on."""
    notice = before + NUMPYS_NOTICE + between
    reports = _told(notice + TRACEBACK.format("KeyError: 'image'"))
    assert [(one.headline, one.confidence) for one in reports] == [
        ("the program raised KeyError: 'image'", "certain")
    ]
    said = reports[0].said[0].lines
    assert not any("import torch" in line for line in said)
    unavailable = _told(notice + TRACEBACK.format("RuntimeError: Numpy is not available"))
    assert any("numpy<2" in one.command for one in unavailable[0].help)


def test_numpys_notice_alone_is_no_failure() -> None:
    assert _told("step 0\n" + NUMPYS_NOTICE + "step 1\n")[0].headline.startswith("nothing in these")


def test_cuda_that_cpp_could_not_start_is_perhaps_a_fork() -> None:
    """A worker of a DataLoader that was forked frees a tensor on the GPU that its parent has."""
    (report,) = _told(
        "terminate called after throwing an instance of 'c10::CUDAError'\n"
        "  what():  CUDA error: initialization error\n"
        "Exception raised from insert_events at CUDACachingAllocator.cpp:1089 (most recent call first):\n"
    )
    assert (report.code, report.confidence) == ("cuda-before-fork", "likely")


def test_a_table_without_pids() -> None:
    log = f"Failures:\n[0]:\n  rank      : 1 (local_rank: 0)\n  exitcode  : 3 \n{'=' * 44}\n"
    report = _told(log)[0]
    assert (report.code, report.ranks) == ("rank-exited", (1,))


@pytest.mark.parametrize(
    ("kind", "words"),
    [("exception_type", "exception_message"), ("exception.type", "exception.message")],
)
def test_the_exception_of_a_json_object(kind: str, words: str) -> None:
    """By the field names of OpenTelemetry and others."""
    line = {"event": "worker.fatal", kind: "RuntimeError", words: "no graph", "rank": 1}
    report = _told(json.dumps(line))[0]
    assert (report.headline, report.ranks) == ("rank 1 raised RuntimeError: no graph", (1,))
    told = {
        **line,
        "exc_info": 'Traceback (most recent call last):\n  File "t.py", line 3, in f\nKeyError: 1',
    }
    assert _told(json.dumps(told))[0].headline == "rank 1 raised KeyError: 1"


def test_the_end_of_a_childs_input_is_no_cause_beside_what_was_not_pickled() -> None:
    child = (
        "Traceback (most recent call last):\n"
        '  File "/opt/py/lib/python3.11/multiprocessing/spawn.py", line 126, in _main\n'
        "    self = reduction.pickle.load(from_parent)\n"
        "EOFError: Ran out of input\n"
    )
    parent = TRACEBACK.format("AttributeError: Can't pickle local object 'main.<locals>.f'")
    assert [r.headline for r in _told(child + parent)] == [
        "the program raised AttributeError: Can't pickle local object 'main.<locals>.f'"
    ]


def test_a_worker_group_that_failed_and_was_started_again() -> None:
    assert _told("step 1\n" + AGAIN)[0].headline.startswith("the launcher says that the job failed")


@pytest.mark.parametrize(
    "line",
    [
        "[error] checkpoint is null !",
        "E0000 collective_ops_utils.h:310] This thread has been waiting for 5000ms for and may be stuck: x",
    ],
)
def test_more_lines_that_speak_of_a_failure(line: str) -> None:
    steps = "".join(f"step {i}\n" for i in range(60))
    assert _told(f"{steps}{line}\n")[0].headline == (
        "line 61 speaks of a failure; the cause is not known"
    )


@pytest.mark.parametrize(
    "bar",
    [
        "29948it [35:34,  7.00s/it]",
        "Generating train split: 0 examples [00:00, ? examples/s]",
        "optim.pt:  23%|##2       | 2.46G/10.9G [00:49<02:12, 63.2MB/s]",
        "upload.bin: 512MB [00:09, 57.1MB/s]",
    ],
)
def test_a_message_behind_any_progress_bar_is_read(bar: str) -> None:
    words = "slurmstepd: error: *** JOB 7 ON gpu1 CANCELLED AT 2026-03-13T04:10:12 ***"
    assert _told(f"{bar}\n{bar}{words}\n")[0].code == "interrupted"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("Epoch 3:  45%|####5     | 100/222 [00:10<00:12,  9.8it/s, loss=0.3Killed", "rank-killed"),
        (" 12/100 [==>...........] - ETA: 1:02 - loss: 0.3Killed", "rank-killed"),
        ("Training:  12%|#2        | 12/100Segmentation fault (core dumped)", "rank-crashed"),
        ("0/10 [00:00<?, ?it/szsh: bus error  python train.py", "rank-crashed"),
        ("已杀死", "rank-killed"),
        ("段错误 (核心已转储)", "rank-crashed"),
        ("run.sh: 行 3: 12345 已杀死               python train.py", "rank-killed"),
        (
            "run.sh\uff1a第 3 行\uff1a12345 已放弃 \uff08核心已转储\uff09 python a.py",
            "rank-crashed",
        ),
    ],
)
def test_what_a_shell_says_behind_any_bar_and_in_chinese_is_read(line: str, code: str) -> None:
    assert _told(f"step 1\n{line}\n")[0].code == code


def test_a_word_of_a_shell_in_a_sentence_tells_nothing() -> None:
    for line in ("3 Killed", "jobs: 2 Killed, 3 done", "status=Killed", "[1] Aborted by user"):
        assert _told(f"step 1\n{line}\n")[0].code == "cause-unknown"


def test_a_traceback_behind_the_echo_of_ctrl_c_is_a_stop_though_its_end_was_not_pasted() -> None:
    cut = 'Traceback (most recent call last):\n  File "/srv/train.py", line 9, in <module>\n    for'
    assert _told(f"^C{cut}")[0].headline == "the job was stopped by Ctrl-C"
    assert _told(cut)[0].code == "cause-unknown"


_INTERRUPTED = 'Traceback (most recent call last):\n  File "/srv/serve.py", line 9, in wait\n    poll()\nKeyboardInterrupt{}\n'


def test_sigterm_that_is_raised_as_ctrl_c_is_told_as_sigterm() -> None:
    """vLLM does so, in all of its versions."""
    assert _told(_INTERRUPTED.format(""))[0].headline == "the job was stopped by Ctrl-C"
    assert (
        _told(_INTERRUPTED.format(": terminated"))[0].headline == "the job was stopped by SIGTERM"
    )


@pytest.mark.parametrize(
    ("command", "confidence"),
    [
        ("['python', 'train.py']", "certain"),
        (
            "['python', '-m', 'torch.distributed.run', '--nproc_per_node', '4', 'train.py']",
            "likely",
        ),
        ("['torchrun', 'train.py']", "likely"),
    ],
)
def test_exit_code_1_of_a_launcher_of_ranks_may_have_any_reason(
    command: str, confidence: str
) -> None:
    words = f"subprocess.CalledProcessError: Command '{command}' returned non-zero exit status 1."
    report = _told(f'Traceback (most recent call last):\n  File "/a/cli.py", line 4\n{words}\n')[0]
    assert (report.code, report.confidence) == ("rank-exited", confidence)


_IGNORED = """epoch 3 loss 0.11
Exception ignored in: <function Queue.{function} at 0x7fc5f6b61a60>
Traceback (most recent call last):
  File "/srv/lib/queue.py", line 345, in {function}
    self.close()
  File "/env/lib/python3.10/site-packages/torch/utils/data/_utils/signal_handling.py", line 66, in handler
    _error_if_any_worker_fails()
RuntimeError: DataLoader worker (pid 280265) is killed by signal: Killed.
"""


def test_the_end_of_a_worker_counts_where_python_ignores_the_exception() -> None:
    """torch's handler raises in whatever code runs then; in a loader that is shut down, its workers
    are to end.
    """
    assert _told(_IGNORED.format(function="put"))[0].code == "rank-killed"
    assert _told(_IGNORED.format(function="__del__"))[0].code == "cause-unknown"


def test_refused_arguments_stay_the_cause_when_ctrl_c_ends_what_runs_next() -> None:
    refused = "usage: train.py [-h] [--workers N]\ntrain.py: error: argument --workers: expected one argument\n"
    report = _told(refused + _INTERRUPTED.format(""))[0]
    assert (report.code, report.logs) == ("rank-exited", ("train.log:2",))


@pytest.mark.parametrize(
    "words",
    [
        "EZ9999: The error from device(chipId:0, dieId:1), serial number is 58, there is an exception of aivec error, core id is 5, error code = 0",
        "        The error from device(chipId:2, dieId:0), serial number is 7, there is an aicore error exception, core id is 28",
        "[Error]: The vector core execution is abnormal.",
    ],
)
def test_a_kernel_that_failed_on_an_npu(words: str) -> None:
    report = _told(f"{words}\n")[0]
    assert report.code == "cuda-kernel-failed"
    assert report.headline.startswith("an NPU kernel failed")


@pytest.mark.parametrize(
    "words",
    [
        "RuntimeError: DataLoader worker (pid(s) 4608) exited unexpectedly",
        "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly",
    ],
)
def test_a_kill_for_memory_explains_a_child_that_is_gone(words: str) -> None:
    text = f'Traceback (most recent call last):\n  File "/a/run.py", line 4, in <module>\n    main()\n{words}\n'
    assert _told(text)[0].code == "rank-raised"
    killed = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch. Some of the step tasks have been OOM Killed.\n"
    reports = _told(text + killed)
    assert [report.code for report in reports] == ["rank-out-of-memory"]
    assert reports[0].headline.startswith("a child process was killed")


@pytest.mark.parametrize(
    ("echo", "code"),
    [
        (
            "^CException ignored in: <function Loader.__del__ at 0x7f0f>\nTraceback (most",
            "interrupted",
        ),
        ("^CProcess Process-3:\nProcess Process-2:\nTraceback (most", "interrupted"),
        ("^C^CKilling subprocess 3401541\n", "interrupted"),
        (
            "^C[2026-03-01 04:51:13,576] [INFO] [launch.py:315:f] Killing subprocess 3\n",
            "interrupted",
        ),
        ("^Cancelled|^CUDA Process: a pattern that a program prints\n", "cause-unknown"),
    ],
)
def test_what_a_program_writes_behind_the_echo_of_ctrl_c(echo: str, code: str) -> None:
    text = echo.replace(
        "Traceback (most", 'Traceback (most recent call last):\n  File "a.py", line 3'
    )
    assert _told(f"step 1\n{text}")[0].code == code
    failed = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nKeyError: 4\n'
    assert _told(f"{failed}{text}")[0].code == "rank-raised"


def test_the_word_of_a_shell_with_the_marks_of_a_page() -> None:
    assert _told("step 1\n**Killed**\n")[0].code == "rank-killed"
    assert _told("step 1\n`Segmentation fault (core dumped)`\n")[0].code == "rank-crashed"
    assert _told("step 1\n** 3 jobs Killed **\n")[0].code == "cause-unknown"


def test_a_watchdog_tells_of_each_rank_the_size_that_it_brought() -> None:
    line = (
        "[rank{0}]:[E318 07:39:53.7 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=610, OpType=COALESCED, NumelIn={1}, NumelOut=8, Timeout(ms)=600000) ran for 600007 milliseconds before timing out.\n"
    )
    report = _told(line.format(1, 56320) + line.format(7, 107520))[0]
    assert report.headline.startswith("rank 1 waited in COALESCED of 56320 elements, call 610 ")
    assert "rank 7 timed out in COALESCED of 107520 elements, call 610" in report.evidence
    report = _told(line.format(1, 8) + line.format(7, 8))[0]
    assert report.headline.startswith("ranks 1 and 7 waited in COALESCED of 8 elements, call 610 ")


@pytest.mark.parametrize(
    ("failed", "then"),
    [(1, "the launcher stopped 3 others"), (2, "the launcher stopped 2 others"), (4, "")],
)
def test_deepspeed_lists_those_that_failed_among_those_that_it_stops(
    failed: int, then: str
) -> None:
    raised = "".join(
        f'[rank{rank}]: Traceback (most recent call last):\n[rank{rank}]:   File "/a/t.py", line 4, in <module>\n'
        f"[rank{rank}]: KeyError: 'lr'\n"
        for rank in range(failed)
    )
    killed = "".join(
        f"[2026-03-01] [INFO] [launch.py:315:f] Killing subprocess {pid}\n" for pid in range(4)
    )
    end = (
        "[2026-03-01] [ERROR] [launch.py:321:sigkill_handler] ['t.py'] exits with return code = 1\n"
    )
    assert _told(raised + killed + end)[0].then == then


@pytest.mark.parametrize(
    ("words", "headline"),
    [
        (
            "RuntimeError: Distributed package doesn't have NCCL built in",
            "the program asked for NCCL, which torch lacks: ",
        ),
        (
            "ValueError: require 2 GPUs, but only 1 GPUs available",
            "the program asked for a device that is not there: ",
        ),
        (
            "ValueError: Total available GPUs 1.0 is less than total desired GPUs 2",
            "the program asked for a device ",
        ),
        (
            "ValueError: GPU 0 needs 40 GiB, but only 24 available",
            "the program raised ValueError: ",
        ),
        (
            "RuntimeError: The server socket has failed to bind to [::]:29501 (errno: 98 - Address already in use). "
            "The server socket has failed to bind to 0.0.0.0:29501 (errno: 98 - Address already in use).",
            "the program could not listen on port 29501: ",
        ),
    ],
)
def test_what_was_not_there_is_named(words: str, headline: str) -> None:
    text = f'Traceback (most recent call last):\n  File "/a/run.py", line 4, in <module>\n    main()\n{words}\n'
    assert _told(text)[0].headline.startswith(headline)


def test_words_that_ranks_tore_from_their_type_begin_without_a_colon() -> None:
    text = 'Traceback (most recent call last):\n  File "/a/run.py", line 4, in <module>\nOSError  File "/a/b.py", line 2, in f\n'
    report = _told(f"{text}: [WinError 1455] The paging file is too small\n")[0]
    assert (
        report.headline
        == "the program ran out of memory: [WinError 1455] The paging file is too small"
    )


def test_llvm_says_why_it_gives_up() -> None:
    report = _told(
        "LLVM ERROR: Failed to infer result type(s).\nzsh: abort      python train.py\n"
    )[0]
    assert (report.code, report.confidence) == ("rank-crashed", "certain")
    assert any("Failed to infer result type(s)." in line for line in report.evidence)


def test_a_task_of_srun_that_is_torchrun_itself_is_no_rank() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/a/site-packages/torch/distributed/{}.py", line 538, in f\n    g()\n'
        "RuntimeError: The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).\n"
        "srun: error: node2: task 3: Exited with exit code 1\n"
    )
    assert _told(text.format("elastic/agent/server/api"))[0].ranks == ()
    assert _told(text.format("rendezvous"))[0].ranks == (3,)

"""Every log of the corpus is told its cause; what is no failure is told to be none."""

from __future__ import annotations

import gzip
import lzma
import os
import pathlib
import random

import pytest
from bench.log_corpus import Expected, expected

from rallypoint.diagnosis import render
from rallypoint.diagnosis.causes import CATALOGUE
from rallypoint.diagnosis.logs import files, speakers
from rallypoint.diagnosis.logs.lines import Sifter, as_utf8, shown
from rallypoint.diagnosis.logs.reader import MOST_SIGHTINGS, Reader, together
from rallypoint.diagnosis.logs.verdict import diagnose
from rallypoint.diagnosis.report import Report
from rallypoint.errors import UsageError


def _told(text: str | bytes, log: str = "train.log") -> tuple[Report, ...]:
    return diagnose(Reader(log).read([text.encode() if isinstance(text, str) else text]))


@pytest.mark.parametrize("one", expected(), ids=lambda one: f"{one.half}/{one.name}")
def test_a_log_of_the_corpus(one: Expected) -> None:
    reports = diagnose(Reader(one.path.name).read([one.path.read_bytes()]))
    report = reports[0]
    assert (report.code, report.ranks if one.ranks else ()) == (one.code, one.ranks), render.text(reports)
    assert report.code in CATALOGUE
    assert report.exit_status == (report.code == "cause-unknown")
    if one.line:
        assert report.logs == (f"{one.path.name}:{one.line}",)
    assert "rallypoint had sent" not in render.text(reports)


@pytest.mark.parametrize("size", [1, 7, 64, 4096])
def test_however_the_bytes_are_cut(size: int) -> None:
    """Also in the middle of a letter, and between a \\r and its \\n."""
    for name in ("torchrun-peers-lost", "torchrun-bars", "spawn-raise", "kubernetes-sigterm"):
        data = next(one.path for one in expected() if one.name == name).read_bytes()
        whole = diagnose(Reader("x").read([data]))
        assert diagnose(Reader("x").read([data[i : i + size] for i in range(0, len(data), size)])) == whole
        windows = data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
        assert diagnose(Reader("x").read([windows]))[0].headline == whole[0].headline


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig", "utf-32"])
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
    findings = reader.read(b"a\r" * 500_000 for _ in range(20))
    assert findings.sightings == ()
    endless = Reader("x").read([b"x" * (1 << 20)] * 16 + [b"\nValueError: x\n"])
    assert [sighting.place.line for sighting in endless.sightings] == [2]
    words = ["".join(chr(97 + (i >> shift) % 16) for shift in (0, 4, 8, 12)) for i in range(MOST_SIGHTINGS + 500)]
    many = Reader("x").read(f"ValueError: {word} is bad\n".encode() for word in words)
    assert len(many.sightings) == MOST_SIGHTINGS
    assert many.left_out == 500


def test_lines_are_counted_and_dull_ones_passed() -> None:
    sifter = Sifter()
    seen = []
    for line in sifter.feed(b"".join(b"step %d: signal ok\nnothing\n" % i for i in range(100)) + b"an Error\n"):
        seen.append((line.number, line.text))
        if "signal" in line.text:
            sifter.call_dull()
    assert seen == [(1, "step 0: signal ok"), (201, "an Error")]
    assert [line.text for line in sifter.before(2)] == ["step 99: signal ok", "nothing"]


def test_colours_bars_and_json() -> None:
    assert shown(b"\x1b[31mValueError\x1b[0m: x") == "ValueError: x"
    assert shown(b'{"log":"ValueError: x\\n","stream":"stderr"}') == "ValueError: x"
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
    speaker, said = speakers.split(line)
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
    report = _told("[rank2]: RuntimeError: [x/pair.cc:5] Connection closed by peer [10.0.0.1]:4\n")[0]
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
    assert report.headline == "the program waited in init_process_group until the timeout; rank 3 never came"
    assert (report.code, report.ranks, report.confidence) == ("ranks-missing", (3,), "likely")
    two = "".join(f"[rank{i}]: {line}\n" for i in (0, 2) for line in joining.replace("/0/3", f"/0/{3 - i}").splitlines())
    assert (report := _told(two)[0]).ranks == (1, 3)
    assert "/default_pg/0//cpu//0/1, is where rank 1 leaves" in report.why
    others = "".join(f"[rank{i}]: {line}\n" for i in (0, 3) for line in joining.splitlines())  # rank 3 came, and waited, too
    assert _told(others)[0].code != "ranks-missing"


def test_a_key_of_the_programs_that_nobody_set_is_named() -> None:
    waiting = "".join(
        f'[rank{i}]: Traceback (most recent call last):\n[rank{i}]:   File "e.py", line 23, in <module>\n[rank{i}]:     s.get("data")\n'
        f"[rank{i}]: torch.distributed.DistStoreError: wait timeout after 4000ms, keys: /default_pg/0//data\n"
        for i in range(2)
    )
    report = _told(waiting)[0]
    assert (report.code, report.ranks, report.confidence) == ("rank-raised", (0, 1), "likely")
    assert report.why == "nothing in the log shows who was to set that key"
    assert _told(waiting + "[rank2]: ValueError: bad\n")[0].headline == "rank 2 raised ValueError: bad"


def test_words_of_torch_that_nobody_here_knows_are_no_certain_cause() -> None:
    head = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()\n'
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
    one = Reader("rank0.log", speakers.of_file("logs/rank0.log")).read([b"RuntimeError: [x/pair.cc:5] Connection closed by peer\n"])
    two = Reader("rank1.log", speakers.of_file("logs/rank1.log")).read(
        [b'step 1\nTraceback (most recent call last):\n  File "t.py", line 9, in main\nKeyError: 3\n']
    )
    report = diagnose(together([one, two]))[0]
    assert (report.ranks, report.logs) == ((1,), ("rank1.log:2",))


def test_our_own_report_in_a_log() -> None:
    report = _told("[0] step 3\nerror[rank-killed]: rank 2 was killed by SIGKILL\n\n  why    who sent SIGKILL is not known\n")[0]
    assert (report.code, report.headline) == ("rank-killed", "rank 2 was killed by SIGKILL")


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_lines_are_there_is_a_report(seed: int) -> None:
    """Lines of all logs in any order, some with broken bytes: what a terminal shared by many ranks may look like at worst."""
    chosen = random.Random(seed)
    lines = [line for one in expected() for line in one.path.read_bytes().split(b"\n")]
    for _ in range(25):
        start = [chosen.randrange(len(lines)) for _ in range(chosen.randint(1, 12))]
        data = bytearray(b"\n".join(line for at in start for line in lines[at : at + chosen.randint(1, 8)]) or b"x")
        for _ in range(chosen.choice((0, 10))):
            data[chosen.randrange(len(data))] = chosen.randrange(256)
        reports = _told(bytes(data))
        assert reports
        assert render.text(reports)
        assert {report.code for report in reports} <= {*CATALOGUE}


def test_files_that_are_no_logs(tmp_path: pathlib.Path) -> None:
    binary, empty = tmp_path / "model.pt", tmp_path / "empty.log"
    binary.write_bytes(bytes(range(256)) * 16)
    empty.touch()
    (tmp_path / "rank0.log").write_text("x")
    for path, words in ((binary, "no text"), (empty, "is empty"), (tmp_path, "is a folder"), (tmp_path / "none.log", "there is no file")):
        with pytest.raises(UsageError, match=words):
            list(files.chunks(str(path)))
    with pytest.raises(UsageError) as caught:
        list(files.chunks(str(tmp_path)))
    assert any(command.endswith("/rank0.log") for _, command in caught.value.help)


def test_compressed_files_also_when_they_are_cut_short(tmp_path: pathlib.Path) -> None:
    text = b"step\n" * 10_000 + b"ValueError: x\n"
    (tmp_path / "a.gz").write_bytes(gzip.compress(text))
    (tmp_path / "a.xz").write_bytes(lzma.compress(text))
    assert b"".join(files.chunks(str(tmp_path / "a.gz"))) == text
    assert b"".join(files.chunks(str(tmp_path / "a.xz"))) == text
    noise = os.urandom(1_500_000).hex().encode()
    (tmp_path / "cut.gz").write_bytes(gzip.compress(noise)[:-20_000])
    read = b"".join(files.chunks(str(tmp_path / "cut.gz")))
    assert len(read) > 1_000_000
    assert noise.startswith(read)


TRACEBACK = 'Traceback (most recent call last):\n  File "t.py", line 4, in <module>\n    main()\n{}\n'
STEPS = "".join(f"step {i} loss 0.5\n" for i in range(30))
FAILED = "E1122 10:00:00.000 1 torch/distributed/elastic/api.py:882] failed (exitcode: {}) local_rank: 2 (pid: {}) of binary: py\n"
AGAIN = "I1122 10:00:01.0 1 api.py:862] [default] Worker group FAILED. 3/3 attempts left; will restart worker group\n"


@pytest.mark.parametrize(
    ("log", "code", "confidence", "words"),
    [
        # Healthy ones, with words that frighten.
        (
            STEPS + "Exception ignored in: <function X.__del__ at 0x1>\n" + TRACEBACK.format("TypeError: x"),
            "cause-unknown",
            "certain",
            "nothing",
        ),
        ("cache is damaged:\n" + TRACEBACK.format("OSError: x") + "rebuilding it\ndone\n", "rank-raised", "likely", "OSError"),
        ("RuntimeError: [Errno 98] Address already in use\ntrying 29501\nstep 1\n", "port-in-use", "likely", "in use"),
        ("sample 3\nKilled\n" + STEPS, "rank-killed", "possible", "SIGKILL"),
        ("Killed  12 monsters\n", "cause-unknown", "certain", "nothing"),
        # What the shell says, as it says it.
        ("step 3\nKilled                  python train.py\n", "rank-killed", "certain", "SIGKILL"),
        ("./train.sh: line 3:  4312 Killed                  python train.py\n" + STEPS, "rank-killed", "certain", "SIGKILL"),
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
            FAILED.format(-9, 7) + AGAIN + STEPS + TRACEBACK.format("KeyError: 'lr'") + FAILED.format(1, 8),
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
            "*** JOB 4 ON n1 CANCELLED AT 2026-01-01T10:00:00 DUE TO PREEMPTION ***\n" + STEPS + TRACEBACK.format("KeyError: 'x'"),
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
        # A hub that did not answer is no peer; an import that was tried is no cause.
        (
            TRACEBACK.format("requests.exceptions.ConnectTimeout: (Caused by ConnectTimeoutError('timed out. (connect timeout=10)'))"),
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
    ],
)
def test_what_misled(log: str, code: str, confidence: str, words: str) -> None:
    """Logs that were once told a wrong cause as certain."""
    first, *others = _told(log)
    assert (first.code, first.confidence) == (code, confidence), render.text((first, *others))
    assert words in first.headline
    assert not others or code == "interrupted"


def test_ranks_that_torch_counts_are_missing_only_when_fewer_came() -> None:
    """More than there should be are not missing: others, or those of an earlier attempt, were counted as well."""
    words = "Timed out initializing process group in store based barrier on rank: 0, for key: store_based_barrier_key:1"
    assert _told(f"RuntimeError: {words} (world_size=4, worker_count=3, timeout=0:01:00)")[0].code == "ranks-missing"
    assert _told(f"RuntimeError: {words} (world_size=4, worker_count=16, timeout=0:01:00)")[0].code == "cause-unknown"


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

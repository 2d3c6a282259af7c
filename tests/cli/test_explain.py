"""`rallypoint explain`: codes to pages, logs and messages to causes, at once."""

from __future__ import annotations

import json
import pathlib
import random
import signal
import subprocess
import sys

import pytest

from rallypoint.cli import main as cli
from rallypoint.diagnosis.catalogue import CATALOGUE, QUESTIONS

from ..warm_python import WarmPopen

OUT_OF_MEMORY = "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"
TRACEBACK = 'Traceback (most recent call last):\n  File "/srv/train.py", line 12, in step\n    loss = f(x)\nValueError: bad batch\n'


def _run(*arguments: str, stdin: bytes | None = None) -> tuple[int, str, str]:
    process = WarmPopen(
        [sys.executable, "-m", "rallypoint", "explain", *arguments],
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = process.communicate(stdin, timeout=60)
    return process.returncode, out.decode(), err.decode()


def _explained(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The same without a process: words and paths need neither stdin nor a terminal."""
    status = cli.main(["explain", *words])
    return status, *capsys.readouterr()


def test_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "rank-killed"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# rank-killed\n")
    assert "## How to fix it" in shown
    assert "<!--" not in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    "word",
    [
        "error[rank-killed]:",
        "error[rank-killed]: rank 2 was killed by SIGKILL",
        "rank_killed",
        "rank killed",
        "RANK-KILLED",
    ],
)
def test_a_code_as_it_was_copied(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", word]) == 0
    assert capsys.readouterr().out.startswith("# rank-killed\n")
    assert cli.main(["explain", *word.split()]) == 0


def test_without_anything_all_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    status, out, _ = _run()
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == [*CATALOGUE, *QUESTIONS]


def test_what_is_no_text_is_refused_from_stdin_too() -> None:
    """`rallypoint explain < /bin/ls` answered that nothing in these lines says that something
    failed.
    """
    for content in (
        pathlib.Path(sys.executable).resolve().read_bytes()[:100_000],
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\x01\x02",
    ):
        status, out, err = _run(stdin=content)
        assert (status, out) == (2, "")
        assert err.startswith("error[usage]: what came from stdin is no text, so it is no log\n")


def test_all_codes_and_a_page_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages, and the list, were as wide as their source."""
    monkeypatch.setenv("COLUMNS", "40")
    out = _run()[1]
    assert [line for line in out.splitlines() if line[0] != " "] == [*CATALOGUE, *QUESTIONS]
    assert max(map(len, out.splitlines())) <= 40
    prose = [line for line in _run("rank-killed")[1].splitlines() if not line.startswith(" ")]
    assert max(map(len, prose[: prose.index("## A script that produces it")])) <= 40


@pytest.mark.parametrize(
    ("message", "headline"),
    [
        (
            "Address already in use",
            "error[port-in-use]: the program could not listen on an address: it is in use",
        ),
        (
            "EADDRINUSE",
            "error[port-in-use]: the program could not listen on an address: it is in use",
        ),
        (
            "bind: Permission denied",
            "error[port-forbidden]: the program may not listen on an address",
        ),
        (
            "Too many open files",
            "error[files-exhausted]: the program has as many files open as it may have: Too many open files",
        ),
        ("Killed", "error[rank-killed]: the program was killed by SIGKILL"),
        (
            "Connection refused",
            "error[cause-unknown]: nobody listens at the address that was connected to",
        ),
        ("hello world", "error[cause-unknown]: nothing in this line says why"),
    ],
)
def test_words_without_the_type_of_an_exception(
    message: str, headline: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a person copies out of a line, or remembers of it."""
    cli.main(["explain", message])
    out, err = capsys.readouterr()
    assert " ".join(out.split()).startswith(headline)
    assert "RuntimeError" not in out, "a type that nobody has said"
    assert err == ""


def test_an_unknown_code_offers_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "rank-kiled"]) == 2
    told = capsys.readouterr().err
    assert "there is no code and no file rank-kiled" in told
    assert "rallypoint explain rank-killed" in told


def test_an_unknown_option_is_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--jsn"]) == 2
    assert capsys.readouterr().err.startswith(
        "error[option-unknown]: rallypoint explain has no option --jsn\n"
    )


@pytest.mark.parametrize(
    ("argv", "headline", "line"),
    [
        (
            ["--error-fromat", "json", "x"],
            "no option --error-fromat; the nearest is --error-format",
            "--error-format json x",
        ),
        (
            ["x", "--error_fromat=json"],
            "no option --error_fromat; the nearest is --error-format",
            "x --error-format=json",
        ),
        (
            ["x", "y", "--json"],
            "no option --json; the nearest is --error-format=json",
            "x y --error-format=json",
        ),
        (["-x", "y"], "no option -x\n", "--help"),
        (["--verbose", "rank-killed"], "no option --verbose\n", "--help"),
        (["300"], "there is no code and no file 300\n", ""),
        ([""], "the message is empty\n", ""),
        ([" ", ""], "the message is empty\n", ""),
    ],
)
def test_what_is_nearly_right(
    argv: list[str], headline: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert headline in err
    assert f"rallypoint explain {line}".rstrip() in [said.strip() for said in err.splitlines()]


@pytest.mark.parametrize(
    "message",
    [
        ["---", "Logging", "error", "---"],
        ["error:", "unrecognized", "arguments:", "--local-rank=0"],
    ],
)
def test_a_message_may_have_dashes(message: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["explain", *message])
    assert "option-unknown" not in capsys.readouterr().err


def test_underscores_are_hyphens(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--error_format=json", "Killed"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_two_codes_are_two_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "rank-killed", "port-in-use"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("# ")] == [
        "# rank-killed",
        "# port-in-use",
    ]


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "NO_COLOR"])
def test_a_page_is_in_bold_where_colours_are_asked_for(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1")
    assert cli.main(["explain", "rank-killed"]) == 0
    assert ("\x1b[1m# rank-killed" in capsys.readouterr().out) == (variable == "FORCE_COLOR")


@pytest.mark.parametrize("word", ["", "/report.json", "/events.jsonl"])
def test_a_kept_run_is_shown_by_another_command(
    word: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its report was read as the log of a program, in which nothing is known."""
    for name in ("plan.json", "events.jsonl", "report.json"):
        (tmp_path / name).write_text("{}")
    status, _, err = _explained(capsys, f"{tmp_path}{word}")
    assert (status, f"rallypoint show {tmp_path}" in err) == (2, True)


def test_a_log(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 1\n" * 5 + TRACEBACK)
    assert cli.main(["explain", str(log)]) == 0
    assert capsys.readouterr().out == (
        "error[rank-raised]: the program raised ValueError: bad batch\n"
        "\n"
        "  where  train.py:12 in step\n"
        "\n"
        "  the program said:\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "/srv/train.py", line 12, in step\n'
        "    |     loss = f(x)\n"
        "    | ValueError: bad batch\n"
        "\n"
        f"  logs   {log}:6\n"
        "  more   rallypoint explain rank-raised\n"
    )


def test_several_logs_are_of_one_job(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0.log").write_text(
        "RuntimeError: [x/pair.cc:5] Connection closed by peer [127.0.0.1]:5\n"
    )
    (tmp_path / "rank1.log").write_text(TRACEBACK)
    assert cli.main(["explain", str(tmp_path / "rank0.log"), str(tmp_path / "rank1.log")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("error[rank-raised]: rank 1 raised ValueError: bad batch\n")
    assert "rank 0 lost the connection" in out


@pytest.mark.parametrize(
    "words",
    [
        ["RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"],
        ["RuntimeError:", "CUDA", "out", "of", "memory.", "Tried", "to"],
    ],
)
def test_a_message(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *words]) == 0
    assert capsys.readouterr().out.startswith(
        "error[rank-out-of-memory]: the program ran out of GPU memory"
    )


def test_a_log_that_names_no_cause(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "train.log"
    log.write_text("step 1\nstep 2\n")
    assert cli.main(["explain", str(log)]) == 1
    assert (
        "error[cause-unknown]: nothing in these 2 lines says that something failed"
        in capsys.readouterr().out
    )


def test_stdin_and_json() -> None:
    status, out, err = _run("--error-format", "json", stdin=TRACEBACK.encode())
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert told["exit_status"] == 0
    assert told["reports"][0]["code"] == "rank-raised"
    assert told["reports"][0]["logs"] == ["stdin:1"]
    assert _run("-", stdin=TRACEBACK.encode())[1].startswith("error[rank-raised]: ")


@pytest.mark.parametrize("format", ["text", "json"])
def test_what_cannot_be_read(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    for words, told in (
        ([str(tmp_path / "none.log")], "there is no file"),
        ([str(tmp_path)], "is a folder"),
        (["-"], "nothing came from stdin"),
        (["/dev/null"], "is empty"),
        (["--error-format", "xml"], "is not one of text, json"),
    ):
        asked = [*words, *([] if "xml" in words else ["--error-format", format])]
        status, out, err = _run(*asked, stdin=b"") if "-" in words else _explained(capsys, *asked)
        assert (status, out) == (2, ""), words
        assert told in err
        if format == "json" and "xml" not in words:
            assert json.loads(err)["reports"][0]["code"] == "usage"


@pytest.mark.parametrize("names", [("rank0.log", "rank1.log"), ("rank1.log", "rank0.log")])
def test_a_rank_that_printed_nothing_has_an_empty_log(
    tmp_path: pathlib.Path, names: tuple[str, str]
) -> None:
    (tmp_path / "rank0.log").touch()
    (tmp_path / "rank1.log").write_text(TRACEBACK)
    status, out, _ = _run(*(str(tmp_path / name) for name in names))
    assert status == 0
    assert out.startswith("error[rank-raised]: ")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--help"]) == 0
    assert "rallypoint explain FILE ..." in capsys.readouterr().out


def test_nothing_heavy_is_imported() -> None:
    """What makes it answer in a tenth of a second."""
    program = (
        "import sys; from rallypoint.cli.main import main; main(['explain', 'rank-killed']); "
        "heavy = {'torch', 'numpy', 'rich', 'psutil', 'asyncio', 'subprocess', 'multiprocessing', 'rallypoint.diagnosis.logs'}; "
        "print(sorted(heavy & {*sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.strip() == "[]"


def test_a_file_of_random_bytes_is_refused() -> None:
    """Random bytes have few enough control characters that they were taken for a text, and 50 MB
    were read for a minute.
    """
    for seed in range(2):
        status, _, err = _run(stdin=random.Random(seed).randbytes(1_000_000))
        assert (status, err.splitlines()[0]) == (
            2,
            "error[usage]: what came from stdin is no text, so it is no log",
        )


def test_ctrl_c_on_a_pipe_tells_what_came_by_then() -> None:
    """Whoever piped a job that hangs into `explain`, and pressed Ctrl-C, was told nothing of what
    had been read.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "rallypoint", "explain"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    with process:
        assert (
            b"reading a log from stdin" in process.stderr.readline()
        )  # nothing has come: it waits
        process.stdin.write(TRACEBACK.encode())
        process.stdin.flush()
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.read().startswith(b"error[rank-raised]: ")  # the pipe is still open
        process.stdin.close()
        assert process.wait(30) == 0


CLASSICS = (
    "ConnectionRefusedError: [Errno 111] Connection refused",
    "The client socket has timed out after 600000ms while trying to connect to (127.0.0.1, 29500)",
    "The client socket has failed to connect to [localhost]:29500",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=600000) ran for 600123 milliseconds before timing out.",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:35412",
    "RuntimeError: Socket Timeout",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "torch.distributed.elastic.rendezvous.api.RendezvousClosedError",
    "socket.gaierror: [Errno -2] Name or service not known",
    "  traceback : Signal 9 (SIGKILL) received by PID 13884",
    "  exitcode  : -11 (pid: 13884)",
)


@pytest.mark.parametrize("line", CLASSICS)
def test_a_classic_line_alone_is_told_its_few_causes(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever pasted the one line that they had was told that its cause is not known, and to look
    at other logs.
    """
    status, out, _ = _explained(capsys, "--error-format", "json", line)
    report = json.loads(out)["reports"][0]
    assert (status, report["code"]) == (1, "cause-unknown")
    assert len(report["evidence"]) >= 2
    assert report["help"][0]["command"]
    if "29500" in line:
        assert any("29500" in help["command"] for help in report["help"])


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (
            "Timed out after 16 seconds waiting for clients. 2/1048576 clients joined.",
            "world-size-differs",
        ),
        ("rank parameter missing", "init-method-invalid"),
        (
            "torch.distributed.DistNetworkError: The IPv4 network addresses of (node01, 29400) "
            "cannot be retrieved (gai error: -2 - Name or service not known).",
            "address-unresolved",
        ),
        ("RuntimeError: context has already been set", "rank-raised"),
        ("KeyError: 'LOCAL_RANK'", "rank-raised"),
    ],
)
def test_a_line_that_names_its_cause_is_told_what_to_do(
    line: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = _explained(capsys, "--error-format", "json", line)
    report = json.loads(out)["reports"][0]
    assert (status, report["code"]) == (0, code)
    assert report["help"][0]["command"]


@pytest.mark.parametrize(
    ("module", "command"),
    [("sklearn.svm", "-m pip install scikit-learn"), ("cv2", "-m pip install opencv-python")],
)
def test_a_module_is_installed_by_the_name_of_its_package(
    module: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pip install sklearn` was advised: a decoy, whose installation fails on purpose."""
    _, out, _ = _explained(
        capsys, "--error-format", "json", f"ModuleNotFoundError: No module named '{module}'"
    )
    assert any(command in help["command"] for help in json.loads(out)["reports"][0]["help"])


def test_no_package_is_guessed_from_the_name_of_an_import(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = _explained(
        capsys, "--error-format", "json", "ModuleNotFoundError: No module named 'mylib'"
    )
    assert not any(
        "pip install" in help["command"] for help in json.loads(out)["reports"][0]["help"]
    )


@pytest.mark.parametrize(
    "word", ["137", "-9", "143", "139", "134", "SIGBUS", "sigsegv", "3", "255"]
)
def test_an_exit_status_has_a_page(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The right answer was dressed as an error of usage: "there is no code and no file 137"."""
    status, out, err = _explained(capsys, word)
    assert (status, err) == (0, "")
    assert out.startswith(f"{word}: ")
    assert "# rank-" in out


def test_75_is_that_of_a_lost_node(capsys: pytest.CaptureFixture[str]) -> None:
    """It was "an exit status that the program chose", with the page of sys.exit."""
    status, out, _ = _explained(capsys, "75")
    assert status == 0
    assert out.startswith("75: a node was lost or did not come, ")
    assert "# node-lost" in out


def test_names_of_logs_that_are_not_there_are_no_message(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two wrong names were read as a message: "nothing in this line says why"."""
    names = [str(tmp_path / name) for name in ("node0.log", "node1.log")]
    status, _, err = _explained(capsys, *names)
    assert status == 2
    assert f"there is no file {names[0]}" in err


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_has_a_page(question: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = _explained(capsys, question)
    assert status == 0
    assert out.startswith("# ")

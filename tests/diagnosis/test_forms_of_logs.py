"""Forms in which logs show an exception or a refusal: torn, woven, nested, without a type, behind
nulls.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from rallypoint.diagnosis.logs import log_files
from rallypoint.diagnosis.logs.reader import Reader
from rallypoint.diagnosis.logs.to_evidence import diagnose
from rallypoint.diagnosis.report import Report
from rallypoint.errors import UsageError

HEAD = "Traceback (most recent call last):\n"
FRAME = '  File "/srv/train.py", line 3, in main\n    step()\n'


def _told(text: str) -> tuple[Report, ...]:
    return diagnose(Reader("train.log").read([text.encode()]))


@pytest.mark.parametrize("before", ["", "starting 2 ranks\n"])
def test_a_hole_of_nulls_is_no_reason_to_refuse_a_log(before: str) -> None:
    """A log that is truncated while a job writes it begins with nulls up to the place of the next
    write, and one on NFS may have some in the middle.
    """
    error = f"{HEAD}{FRAME}ValueError: no batches\n"
    log = before.encode() + b"\0" * 70_000 + error.encode()
    chunks = log_files.of_stream(_reading(log))
    report = diagnose(Reader("train.log").read(chunks))[0]
    assert report.code == "rank-raised"
    assert report.headline.endswith("ValueError: no batches")


def _reading(log: bytes) -> Callable[[int], bytes]:
    return io.BytesIO(log).read


def test_bytes_with_scattered_nulls_are_no_log() -> None:
    with pytest.raises(UsageError):
        list(log_files.of_stream(_reading(b"\x7fELF\x02\x01\x01\0\0\3\0>\0\1\0\0\0" * 500)))


@pytest.mark.parametrize("between", ["", "\n"])
def test_below_a_colon_stands_what_the_exception_was_raised_for(between: str) -> None:
    """Ray raises so what an actor's module raised when it was imported."""
    inner = f"{HEAD}{FRAME}KeyError: 'lr'\n"
    outer = f"{HEAD}{FRAME}RuntimeError: the actor Trainer could not be imported:\n"
    (report,) = _told(outer + between + inner)
    assert report.headline.endswith("KeyError: 'lr'")


def test_what_another_rank_says_of_its_peer_below_a_colon_is_not_what_it_was_raised_for() -> None:
    lost = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:7\n"
    (report,) = _told(f"{HEAD}{FRAME}ValueError: the configuration is wrong:\n{HEAD}{FRAME}{lost}")
    assert "ValueError: the configuration is wrong:" in report.headline


def test_a_traceback_below_another_message_is_another_exception() -> None:
    other = f"{HEAD}{FRAME.replace('train', 'other')}KeyError: 'lr'\n"
    assert len(_told(f"[rank0]: {HEAD}[rank0]: {FRAME}[rank0]: ValueError: x\n{other}")) == 2


@pytest.mark.parametrize("frames", [0, 1, 4])
def test_a_nested_message_names_its_own_exception(frames: int) -> None:
    """TensorFlow shows so what the code of a tf.data pipeline raised."""
    above = '    File "/srv/data.py", line 20, in mapped  *\n        return shifted(one)\n'
    text = (
        f"{HEAD}{FRAME}ValueError: in user code:\n\n{above * frames}"
        '    File "/srv/data.py", line 31, in shifted  **\n        raise KeyError(name)\n\n'
        "    KeyError: 'gripper'\n"
    )
    (report,) = _told(text)
    assert report.headline.endswith("KeyError: 'gripper'")


def test_a_message_without_its_type_has_that_of_the_line_that_raises() -> None:
    """A hook that prints `traceback.format_tb` and the exception itself leaves the type out."""
    frame = '  File "/srv/model.py", line 8, in load\n    raise LayoutError(\n'
    (report,) = _told(f"{HEAD}{FRAME}{frame}the layers do not fit\n")
    assert report.code == "rank-raised"
    assert report.headline.endswith("LayoutError: the layers do not fit")
    # where the type does come, what another process wrote between is no message
    (report,) = _told(f"{HEAD}{FRAME}{frame}step 3 done\nLayoutError: the layers do not fit\n")
    assert report.headline.endswith("LayoutError: the layers do not fit")


@pytest.mark.parametrize(
    "last",
    [
        "NameErrorNameError: : name 'size' is not definedname 'size' is not defined\n",
        "srv.errorssrv.errors..NameErrorNameError: : name 'size' is not defined\n",
    ],
)
def test_of_last_lines_that_two_ranks_wrote_into_each_other(last: str) -> None:
    (report,) = _told(f"{HEAD}{HEAD}{FRAME}{FRAME}{last}\n")
    assert report.code == "rank-raised"
    assert report.headline.endswith("NameError: name 'size' is not defined")


def test_old_gloo_lost_its_peer() -> None:
    text = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail at /b/gloo/transport/tcp/pair.cc:498] optval == 0. 111 vs 0. SO_ERROR: Connection refused\n"
        "mpirun noticed that process rank 1 with PID 4 on node n1 exited on signal 6 (Aborted).\n"
    )
    assert [report.code for report in _told(text)] == ["cause-unknown"]


@pytest.mark.parametrize("words", ["worker is 6 feet under", "workers are no longer alive"])
def test_a_pool_lost_the_process_that_was_killed_for_memory(words: str) -> None:
    text = (
        f"{HEAD}{FRAME}RuntimeError: Some background {words}.\n"
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.\n"
        "srun: error: n1: task 0: Out Of Memory\n"
    )
    assert [report.code for report in _told(text)] == ["rank-out-of-memory"]


@pytest.mark.parametrize(
    ("reason", "command"),
    [
        ("Unable to satisfy cpu bind request", "unset ${!SLURM_CPU_BIND@}"),
        ("Communication connection failure", "sinfo -R"),
    ],
)
def test_srun_says_in_several_lines_that_it_did_not_start_the_job(
    reason: str, command: str
) -> None:
    (report,) = _told(
        f"srun: error: Task launch for StepId=7.0 failed on node n1: {reason}\n"
        f"srun: error: Application launch failed: {reason}\nsrun: Job step aborted\n"
    )
    assert (report.code, report.confidence) == ("start-failed", "certain")
    assert [one.command for one in report.help] == [command]


def test_a_space_behind_a_backslash_is_an_argument() -> None:
    (report,) = _told("/usr/bin/python: can't open file ' ': [Errno 2] No such file or directory\n")
    assert report.headline.startswith("' ' ")
    assert "backslash" in report.help[0].sentence


def test_ssh_refuses_behind_the_names_of_hosts() -> None:
    (report,) = _told("n1: ada@n1: Permission denied (publickey,password).\n")
    assert report.code == "start-failed"


@pytest.mark.parametrize("form", ["12:00:0{} {} trainer: {}\n", "{1}:trainer:{2}\n"])
def test_a_line_of_level_error_is_shown_wherever_it_stands(form: str) -> None:
    quiet = "".join(form.format(i % 10, "INFO", f"step {i} of {i * i}") for i in range(100))
    (report,) = _told(quiet + form.format(9, "ERROR", "the loss is NaN, giving up"))
    assert (report.code, report.logs) == ("cause-unknown", ("train.log:101",))


def test_a_logger_that_writes_all_at_level_error_is_shown() -> None:
    (report,) = _told("ERROR:core.check:nan on rank 3\nERROR:core.check:rank 3: again nan\n")
    assert report.logs == ("train.log:1",)


def test_llvm_took_an_error_back() -> None:
    """MLIR shows what it compiled, and the call raises."""
    (report,) = _told(
        "LLVM ERROR: Unsupported rounding mode.\n#blocked = #ttg.blocked<{order = [1, 0]}>\n"
        f"module {{\n}}\n{HEAD}{FRAME}RuntimeError: PassManager::run failed\n"
    )
    assert report.code == "rank-raised"
    assert any("Unsupported rounding mode" in line for line in report.evidence)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("access violation", "rank-crashed"),
        ("stack overflow", "rank-crashed"),
        ("code 0xe06d7363", "cause-unknown"),  # an exception of C++, which is mostly caught
    ],
)
def test_faulthandler_on_windows(words: str, code: str) -> None:
    (report,) = _told(
        f"Windows fatal exception: {words}\n\nCurrent thread 0x000030c (most recent call first):\n"
        '  File "C:\\srv\\train.py", line 84 in step\n'
    )
    assert report.code == code
    assert ("SIGSEGV" in report.headline) == (code == "rank-crashed")


def test_a_function_of_a_notebook_is_to_be_put_into_a_file() -> None:
    (report,) = _told(
        f"{HEAD}{FRAME}AttributeError: Can't get attribute 'train' on <module '__main__' (built-in)>\n"
    )
    assert any("file" in one.sentence for one in report.help)

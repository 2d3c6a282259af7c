"""`rallypoint.launch`, with real processes: what a caller gets."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rallypoint
from rallypoint.errors import LaunchTimeout, RankExited, RankKilled, UsageError, WorkerError

from .job import SLOW_TORCH

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("torch_in_parts")]


def script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run a program as a user would, from a file without `if __name__ == "__main__"`."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=100, cwd=folder
    )


@pytest.mark.usefixtures("without_torch")
def test_a_function_that_was_typed_behind_c_has_a_place() -> None:
    program = "import rallypoint\ndef f():\n    raise ValueError('bad')\nrallypoint.launch(f)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert "rank-raised]: rank 0 raised ValueError: bad" in done.stderr
    assert "where  <string>:3 in f, pid " in done.stderr
    assert 'File "<string>", line 3, in f' in done.stderr


def test_results_come_by_rank_and_the_environment_is_torchruns() -> None:
    def who() -> tuple[str, ...]:
        return tuple(
            os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        )

    assert rallypoint.launch(who, nproc=3) == [
        (str(rank), str(rank), "3", "3") for rank in range(3)
    ]


def test_arguments_lambdas_and_closures() -> None:
    factor = 3
    assert rallypoint.launch(lambda x, *, y: (x + y) * factor, (1,), {"y": 2}) == [9]
    assert rallypoint.launch(lambda rank, x: rank * x, (10,), nproc=3, pass_rank=True) == [
        0,
        10,
        20,
    ]


def test_the_process_group_is_open_and_closed_after_it() -> None:
    def summed() -> float:
        import torch
        import torch.distributed as dist

        value = torch.ones(2) * dist.get_rank()
        dist.all_reduce(value)
        return float(value.sum())

    assert rallypoint.launch(summed, nproc=4, backend="gloo") == [12.0] * 4


def test_a_function_may_close_the_group_itself() -> None:
    def closes() -> bool:
        import torch.distributed as dist

        dist.destroy_process_group()
        return dist.is_initialized()

    assert rallypoint.launch(closes, nproc=2, backend="gloo") == [False, False]


def test_a_second_group_is_refused_with_both_lines() -> None:
    def twice() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")

    with pytest.raises(WorkerError) as caught:
        rallypoint.launch(twice, nproc=2, backend="gloo")
    assert caught.value.report.code == "group-twice"  # type: ignore[attr-defined]
    text = str(caught.value)
    assert text.count("test_launch.py:") >= 2
    assert "leave the second call out" in text


def test_what_ranks_print_appears_here(capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print("to stdout")
        print("to stderr", file=sys.stderr)

    rallypoint.launch(speak, nproc=2)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[0] to stdout", "[1] to stdout"]
    assert sorted(SLOW_TORCH.sub("", err).splitlines()) == ["[0] to stderr", "[1] to stderr"]


def test_one_rank_has_no_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    rallypoint.launch(lambda: print("alone"))
    assert capsys.readouterr().out == "alone\n"


def test_the_causing_rank_is_named_and_its_exception_is_the_member() -> None:
    def fails(rank: int) -> int:
        if rank == 2:
            raise KeyError("lr")
        time.sleep(60)
        return rank

    with pytest.raises(WorkerError) as caught:
        rallypoint.launch(fails, nproc=4, pass_rank=True)
    error = caught.value
    assert error.ranks == (2,)
    assert [type(member) for member in error.exceptions] == [KeyError]
    assert error.exceptions[0].args == ("lr",)
    assert "in fails" in str(error.exceptions[0].__cause__)
    assert "rank 2 raised KeyError: 'lr'" in str(error)
    assert "ranks 0-1 and 3 were stopped; they are not at fault" in str(error)
    assert error.results == {}


def test_results_of_the_others_are_kept() -> None:
    def mixed(rank: int) -> int:
        if rank == 1:
            raise ValueError("no")
        return rank * 10

    with pytest.raises(WorkerError) as caught:
        rallypoint.launch(mixed, nproc=3, pass_rank=True, on_failure="continue")
    assert caught.value.results == {0: 0, 2: 20}


def test_who_fails_because_another_did_is_no_member() -> None:
    def meets(rank: int) -> None:
        import torch.distributed as dist

        dist.barrier()
        if rank == 1:
            raise KeyError("lr")
        dist.barrier()

    with pytest.raises(WorkerError) as caught:
        rallypoint.launch(meets, nproc=3, pass_rank=True, backend="gloo", on_failure="continue")
    assert (caught.value.ranks, [type(member) for member in caught.value.exceptions]) == (
        (1,),
        [KeyError],
    )
    assert "rank 1 raised KeyError" in str(caught.value)
    assert "cause-unknown" not in str(caught.value)


def test_except_star_finds_it() -> None:
    def fails() -> None:
        raise ZeroDivisionError("x")

    found: list[BaseException] = []
    try:
        rallypoint.launch(fails)
    except* ZeroDivisionError as group:
        found += group.exceptions
    assert [type(one) for one in found] == [ZeroDivisionError]


@pytest.mark.parametrize(("code", "status"), [(3, 3), (256 + 3, 3)])
def test_sys_exit_and_os_exit(code: int, status: int) -> None:
    for leave in (lambda: sys.exit(code & 0xFF), lambda: os._exit(status)):
        with pytest.raises(WorkerError) as caught:
            rallypoint.launch(leave, nproc=2)
        member = caught.value.exceptions[0]
        assert isinstance(member, RankExited)
        assert member.exit_code == status


def test_a_killed_rank() -> None:
    def dies(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(WorkerError) as caught:
        rallypoint.launch(dies, nproc=2, pass_rank=True)
    (member,) = caught.value.exceptions
    assert isinstance(member, RankKilled)
    assert (member.rank, member.signal) == (1, signal.SIGKILL)


def test_leaving_with_success_returns_none() -> None:
    assert rallypoint.launch(lambda: sys.exit(0), nproc=2) == [None, None]


def test_leaving_without_a_word_is_no_result() -> None:
    """os._exit(0) gave None, as if the function had returned it."""

    def leaves(rank: int) -> int:
        if rank == 1:
            os._exit(0)
        return rank

    with pytest.raises(WorkerError, match="rank 1 exited with code 0") as caught:
        rallypoint.launch(leaves, nproc=2, pass_rank=True)
    (member,) = caught.value.exceptions
    assert isinstance(member, RankExited)
    assert (caught.value.ranks, member.exit_code, caught.value.results) == ((1,), 0, {0: 0})


def test_a_hang_is_bounded_and_says_where_it_was() -> None:
    def hangs(rank: int) -> str:
        if rank == 0:
            return "done"
        time.sleep(600)
        return ""

    rallypoint.launch(int, nproc=2)  # starts what stays warm
    began = time.monotonic()
    with pytest.raises(LaunchTimeout) as caught:
        rallypoint.launch(hangs, nproc=2, pass_rank=True, timeout=8)
    assert time.monotonic() - began < 60
    assert caught.value.results == {0: "done"}
    assert "rank 1" in str(caught.value)
    assert "in hangs" in str(caught.value)


class _Slow:
    """An argument that takes four seconds to be copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        time.sleep(4)
        return int, ()


def test_the_time_of_a_call_begins_with_the_call() -> None:
    """It began when the agent had the request: a busy machine, which takes seconds to start the
    agent, added them to it.
    """

    def waits(_: int) -> None:
        time.sleep(4)  # it would return if its 5 s began with the request

    rallypoint.launch(int)
    with pytest.raises(LaunchTimeout):
        rallypoint.launch(waits, (_Slow(),), timeout=5)


def test_restarts_run_all_ranks_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only that they were started again was said, and not why."""

    def once_bad(rank: int, folder: str) -> int:
        marker = Path(folder, "seen")
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if rank == 1 and attempt == 0:
            marker.write_text("x")
            raise RuntimeError("the first time")
        return attempt

    assert rallypoint.launch(
        once_bad, (str(tmp_path),), nproc=2, pass_rank=True, max_restarts=1
    ) == [1, 1]
    assert (tmp_path / "seen").exists()
    why, again = capsys.readouterr().err.splitlines()
    assert why.startswith("rallypoint: rank 1 raised RuntimeError: the first time, ")
    assert " in once_bad, pid " in why
    assert again == "rallypoint: restarting both ranks, attempt 1 of 1"


def test_the_jobs_store_is_there() -> None:
    def counted() -> int:
        store = rallypoint.connect()
        store.add("n", 1)
        return int(store.barrier("all", 3) > 0 and store["n"])

    assert rallypoint.launch(counted, nproc=3) == [3, 3, 3]


def test_large_results_come_back() -> None:
    def large(rank: int) -> Any:
        import torch

        return {"w": torch.full((1000, 1000), float(rank)), "names": ["a"] * 10}

    results = rallypoint.launch(large, nproc=2, pass_rank=True)
    assert [float(one["w"].mean()) for one in results] == [0.0, 1.0]


def test_an_exception_whose_class_exists_only_there() -> None:
    def fails() -> None:
        class Odd(Exception):
            def __init__(
                self, a: int, b: int
            ) -> None:  # its args do not fit: it cannot be built again
                super().__init__(f"{a}+{b}")

        raise Odd(1, 2)

    with pytest.raises(WorkerError) as caught:
        rallypoint.launch(fails)
    (member,) = caught.value.exceptions
    assert "1+2" in str(member)


def test_what_cannot_be_returned_is_named() -> None:
    def returns() -> Any:
        return {"model": [threading.Lock()]}

    with pytest.raises(WorkerError) as caught:
        rallypoint.launch(returns, nproc=2)
    assert "result-unsupported" in str(caught.value)
    assert "['model'][0]" in str(caught.value) or '["model"][0]' in str(caught.value)


def test_it_works_in_a_thread_beside_an_event_loop() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            None, lambda: rallypoint.launch(lambda rank: rank, nproc=2, pass_rank=True)
        )

    assert asyncio.run(main()) == [0, 1]


def test_two_threads_launch_at_once() -> None:
    found: dict[int, list[int]] = {}

    def one(number: int) -> None:
        found[number] = rallypoint.launch(lambda rank: rank + 10 * number, nproc=2, pass_rank=True)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert found == {0: [0, 1], 1: [10, 11]}


@pytest.mark.usefixtures("without_torch")
def test_a_script_needs_no_main_guard_and_a_child_forked_by_the_caller_can_launch(
    tmp_path: Path,
) -> None:
    done = script(
        tmp_path,
        """
        import os
        import rallypoint

        def work(x):
            return x * int(os.environ["RANK"])

        print(rallypoint.launch(work, (3,), nproc=2), flush=True)
        if (pid := os.fork()) == 0:
            print(rallypoint.launch(work, (5,), nproc=2), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        """,
    )
    assert done.stdout == "[0, 3]\n[0, 5]\n", done.stderr
    assert done.stderr == ""


@contextmanager
def running(path: Path, **how: Any) -> Iterator[subprocess.Popen[str]]:
    """A program that runs. In the end it is killed, and its pipes closed, which a later test would
    see.
    """
    with subprocess.Popen(
        [sys.executable, "-u", str(path)], stdout=subprocess.PIPE, text=True, **how
    ) as program:
        try:
            yield program
        finally:
            program.kill()


@pytest.mark.usefixtures("without_torch")
def test_ctrl_c_stops_all_and_raises_once(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent(
            """
            import time
            import rallypoint

            def work():
                print("ready", flush=True)
                time.sleep(600)

            try:
                rallypoint.launch(work, nproc=2)
            except KeyboardInterrupt:
                print("interrupted once")
            """
        )
    )
    with running(path, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True) as program:
        assert program.stdout is not None
        assert sorted(program.stdout.readline() for _ in range(2)) == [
            "[0] ready\n",
            "[1] ready\n",
        ]
        os.kill(program.pid, signal.SIGINT)
        out, err = program.communicate(timeout=60)
    assert out == "interrupted once\n"
    assert "the job was stopped by Ctrl-C" in err
    # A rank that has just said so may stand at the end of that line yet.
    stood = re.findall(r"ranks? ([0-9-]+)  program\.py:[67] in work", err)
    assert stood in (["0-1"], ["0", "1"]), err
    assert program.returncode == 0


@pytest.mark.usefixtures("without_torch")
def test_ranks_that_do_not_end_are_named_while_they_are_waited_for(tmp_path: Path) -> None:
    """Nothing was said until the grace was over: a cell seemed to ignore the interrupt."""
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent(
            """
            import signal, time
            import rallypoint

            def work():
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                print("ready", flush=True)
                time.sleep(600)

            rallypoint.launch(work, nproc=2)
            """
        )
    )
    with running(path, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        assert [program.stdout.readline()[3:] for _ in range(2)] == [" ready\n"] * 2
        os.kill(program.pid, signal.SIGINT)
        assert program.stderr.readline() == (
            "rallypoint: waiting up to 30 s for ranks 0-1 to end; Ctrl-C again kills them\n"
        )
        os.kill(program.pid, signal.SIGINT)
        _, err = program.communicate(timeout=60)
    assert "ranks 0-1 did not end and were killed: a second signal (SIGINT) has come" in err


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_caller(tmp_path: Path, number: int) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent(
            """
            import os, time
            import rallypoint

            def work():
                print(os.getpid(), flush=True)
                time.sleep(600)

            rallypoint.launch(work, nproc=2)
            """
        )
    )
    with running(path) as program:
        assert program.stdout is not None
        pids = [int(program.stdout.readline().split()[1]) for _ in range(2)]
        pidfds = [os.pidfd_open(pid) for pid in pids]
        program.send_signal(number)
        program.communicate(timeout=30)

    poll = select.poll()
    for fd in pidfds:
        poll.register(fd, select.POLLIN)
    gone: set[int] = set()
    deadline = time.monotonic() + 20
    while len(gone) < 2:
        found = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        assert found, "ranks live on"
        for fd, _ in found:
            gone.add(fd)
            poll.unregister(fd)
    for fd in pidfds:
        os.close(fd)


def test_many_launches_leave_nothing() -> None:
    def nothing() -> None:
        return None

    rallypoint.launch(nothing, nproc=2)
    gc.collect()  # what other tests have left
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(10):
        rallypoint.launch(nothing, nproc=2)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert threading.active_count() <= threads


@pytest.mark.usefixtures("without_torch")
def test_an_edited_module_is_seen_and_a_preloaded_one_reported(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        """
        import pathlib, sys, os
        import rallypoint

        module = pathlib.Path("mine.py")
        module.write_text("value = 1\\n")

        def work():
            import mine
            return mine.value

        print(rallypoint.launch(work), rallypoint.launch(work, preload=["mine"]), flush=True)
        module.write_text("value = 22\\n")
        print(rallypoint.launch(work, preload=["mine"]), rallypoint.launch(work), flush=True)
        """,
    )
    assert done.stdout == "[1] [1]\n[22] [22]\n", done.stderr
    assert "mine.py was changed since it was preloaded" in done.stderr


def test_wrong_arguments_are_answered_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="nproc=0"):
        rallypoint.launch(print, nproc=0)
    with pytest.raises(TypeError, match="nproc='2'"):
        rallypoint.launch(print, nproc="2")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="backend='glo'"):
        rallypoint.launch(print, backend="glo")
    with pytest.raises(UsageError, match="on_failure"):
        rallypoint.launch(print, on_failure="ignore")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="timeout"):
        rallypoint.launch(print, timeout=0)
    with pytest.raises(UsageError, match="grace=9 is not less than timeout=4"):
        rallypoint.launch(print, timeout=4, grace=9)
    for name, value in (("A=B", "1"), ("", "1"), ("A\0", "1"), ("A", "1\0")):
        with pytest.raises(UsageError, match="is no variable"):
            rallypoint.launch(print, env={name: value})


def test_env_reaches_the_ranks_and_changes_are_seen() -> None:
    def look() -> tuple[str | None, str | None]:
        return os.environ.get("RP_TEST_A"), os.environ.get("RP_TEST_B")

    os.environ["RP_TEST_B"] = "1"
    assert rallypoint.launch(look, env={"RP_TEST_A": "x"}) == [("x", "1")]
    del os.environ["RP_TEST_B"]
    assert rallypoint.launch(look) == [(None, None)]
    assert rallypoint.launch(look, env={"RP_TEST_A": None}) == [(None, None)]


@pytest.mark.usefixtures("without_torch")
def test_a_killed_agent_is_said_and_the_next_launch_works(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        """
        import os, signal, time
        import rallypoint

        def kills_agent():
            with open(f"/proc/{os.getppid()}/stat") as file:
                agent = int(file.read().rpartition(")")[2].split()[1])
            os.kill(agent, signal.SIGKILL)
            time.sleep(600)

        try:
            rallypoint.launch(kills_agent)
        except rallypoint.EnvironmentProblem as error:
            print(error.code)
        print(rallypoint.launch(lambda: 5))
        """,
    )
    assert done.stdout == "launcher-died\n[5]\n", done.stderr


@pytest.mark.usefixtures("without_torch")
def test_an_agent_that_ends_before_the_call_begins_could_not_start(tmp_path: Path) -> None:
    """Its ranks were said to be stopped, and a fault of rallypoint's own was told."""
    done = script(
        tmp_path,
        """
        import sys
        import rallypoint

        sys.executable = "/bin/false"
        try:
            rallypoint.launch(lambda: 5)
        except rallypoint.EnvironmentProblem as error:
            print(error.code)
        """,
    )
    assert done.stdout == "start-failed\n", done.stderr


@pytest.mark.usefixtures("without_torch")
def test_a_killed_agent_is_seen_though_a_forked_child_has_its_end_of_the_line(
    tmp_path: Path,
) -> None:
    """A thread that forked while another one started the agent gave its child both ends: `launch`
    waited for ever.
    """
    done = script(
        tmp_path,
        """
        import os, signal, time
        import rallypoint
        from rallypoint.launcher import spawn as boot

        spawn, here = boot.spawn, os.getpid()

        def forks_first(*arguments, **how):
            if os.fork() == 0:
                while os.getppid() == here:
                    time.sleep(0.1)
                os._exit(0)
            return spawn(*arguments, **how)

        def agent():
            with open(f"/proc/{os.getppid()}/stat") as file:
                return int(file.read().rpartition(")")[2].split()[1])

        def kills_agent():
            os.kill(agent(), signal.SIGKILL)
            time.sleep(600)

        boot.spawn = forks_first
        idle = rallypoint.launch(agent)[0]
        os.kill(idle, signal.SIGKILL)
        os.waitid(os.P_PID, idle, os.WEXITED | os.WNOWAIT)
        print(rallypoint.launch(lambda: 5))
        try:
            rallypoint.launch(kills_agent)
        except rallypoint.EnvironmentProblem as error:
            print(error.code)
        """,
    )
    assert done.stdout == "[5]\nlauncher-died\n", done.stderr


@pytest.mark.usefixtures("without_torch")
def test_an_agent_that_was_killed_for_memory(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        """
        import os, signal, time
        import rallypoint
        from rallypoint.diagnosis import evidence

        def kills_agent():
            with open(f"/proc/{os.getppid()}/stat") as file:
                agent = int(file.read().rpartition(")")[2].split()[1])
            os.kill(agent, signal.SIGKILL)
            time.sleep(600)

        counts = iter([3, 5])  # the kernel's, before and after
        evidence.memory_counters = lambda: evidence.MemoryCounters(next(counts), 64 << 20, path="/sys/fs/cgroup/memory.events")
        try:
            rallypoint.launch(kills_agent)
        except rallypoint.EnvironmentProblem as error:
            print(error.code, error.why[0], sep=": ")
        """,
    )
    words = "during the call the kernel killed 2 processes of this control group, which may use 64.0 MiB, for lack of memory"
    assert done.stdout == f"launcher-died: {words}\n", done.stderr


def test_memory_that_was_shared_is_the_same_there() -> None:
    import torch

    shared = torch.zeros(4).share_memory_()  # type: ignore[no-untyped-call]

    def writes(tensor: torch.Tensor, rank: int) -> None:
        tensor[rank] = rank + 1

    rallypoint.launch(lambda rank, tensor: writes(tensor, rank), (shared,), nproc=4, pass_rank=True)
    assert shared.tolist() == [1.0, 2.0, 3.0, 4.0]

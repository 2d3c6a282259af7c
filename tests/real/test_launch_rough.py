"""`rallypoint.launch` where things go wrong around it: interrupts, forks, stopped helpers, odd
surroundings, calls after bad calls.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import rallypoint

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("without_torch")]


def script(folder: Path, text: str, *, preamble: str = "") -> str:
    """Run a program as a user would; what it said on stdout. Fails with its stderr when it does not
    end well.
    """
    path = folder / "program.py"
    path.write_text(preamble + textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, "-u", str(path)], capture_output=True, text=True, timeout=100, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_developers_mode_hears_nothing_of_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector found the launcher's socket at its end, and told the user of it."""
    monkeypatch.setenv("PYTHONDEVMODE", "1")
    program = tmp_path / "program.py"
    program.write_text("import rallypoint\nprint(rallypoint.launch(int))\n")
    # To the end of all that have its stderr, the launcher included.
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0]\n", "")


def test_timeout_holds_over_restarts(tmp_path: Path) -> None:
    said = script(
        tmp_path,
        """
        import os, time
        import rallypoint

        def work():
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                raise RuntimeError("the first time")
            time.sleep(600)

        rallypoint.launch(int)
        try:
            rallypoint.launch(work, timeout=3, max_restarts=1)
        except rallypoint.LaunchTimeout as error:
            print(error.code)
        """,
    )
    assert said == "launch-timeout\n"


def test_a_call_that_was_over_before_the_template_was_ready_leaves_a_good_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1)\n")
    said = script(
        tmp_path,
        """
        import select, time
        import rallypoint
        from rallypoint.launcher.launch import agent_pool

        try:
            rallypoint.launch(int, timeout=0.3, preload=["slow"])
        except rallypoint.LaunchTimeout as error:
            print(error.code)
        children = f"/proc/{agent_pool._idle[0].pid}/task/{agent_pool._idle[0].pid}/children"
        def waits(pid):  # in epoll_wait, or epoll_pwait of x86-64 or ARM
            return open(f"/proc/{pid}/syscall").read().split()[0] in ("232", "281", "22")
        def template_waits():
            for pid in open(children).read().split():
                if b"template_main" in open(f"/proc/{pid}/cmdline", "rb").read() and waits(pid):
                    return True
            return False
        deadline = time.monotonic() + 60
        while not template_waits():
            assert time.monotonic() < deadline
            select.select([], [], [], 0.05)
        print(rallypoint.launch(int, preload=["slow"], timeout=60))
        """,
    )
    assert said == "launch-timeout\n[0]\n"


def test_a_call_that_cannot_be_made_imports_nothing_of_the_users(tmp_path: Path) -> None:
    """The template starts with the call, and what is wrong with that is found while torch is
    imported: the next call has it warm.
    """
    (tmp_path / "mine.py").write_text("print('imported', flush=True)\n")
    said = script(
        tmp_path,
        """
        import threading
        import rallypoint
        from rallypoint.launcher.launch import agent_pool

        lock = threading.Lock()
        def locks():
            with lock:
                return 1

        for _ in range(2):
            try:
                rallypoint.launch(locks, preload=["mine"])
            except rallypoint.UsageError as error:
                print(error.code)
        agent, = agent_pool._idle
        print(rallypoint.launch(lambda: 1, preload=["mine"]), agent_pool._idle == [agent])
        """,
    )
    assert said == "lock-in-wrong-scope\nlock-in-wrong-scope\nimported\n[1] True\n"


def test_a_program_that_has_become_another_user_gets_another_agent(tmp_path: Path) -> None:
    """The functions of one that had given up root ran as root."""
    said = script(
        tmp_path,
        """
        import os
        import rallypoint
        from rallypoint.launcher.launch import agent_pool

        rallypoint.launch(int)
        agent, = agent_pool._idle
        os.geteuid = lambda: 12345
        print(rallypoint.launch(int), agent_pool._idle[0] is agent, len(agent_pool._idle))
        """,
    )
    assert said == "[0] True 2\n"


def test_what_the_function_wants_done_at_the_end_is_done(tmp_path: Path) -> None:
    said = script(
        tmp_path,
        """
        import rallypoint

        def work():
            import atexit, gc, sys, weakref
            class Resource: pass
            kept = sys.kept = Resource()
            weakref.finalize(kept, print, "finalized")
            atexit.register(print, "at exit")
            return gc.isenabled()

        print(rallypoint.launch(work))
        """,
    )
    assert sorted(said.splitlines()) == ["[True]", "at exit", "finalized"]


def test_advice_is_in_terms_of_launch(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    said = script(
        tmp_path,
        """
        import rallypoint

        for wrong in ({"run_dir": "/proc/x"}, {"preload": ["not_to_be_found"]}):
            try:
                rallypoint.launch(int, **wrong)
            except rallypoint.EnvironmentProblem as error:
                print(error.help[0][1] if "run_dir" in wrong else error.why[0])
        try:
            rallypoint.launch(int, preload=["broken"])
        except rallypoint.EnvironmentProblem as error:
            print('broken.py", line 2, in <module>' in error.why[1])
        try:
            rallypoint.launch(lambda: (x for x in "ab"))
        except rallypoint.WorkerError as error:
            print(error.report.help[0].command)
        """,
    )
    assert said.splitlines() == [
        'rallypoint.launch(..., run_dir="DIR")',
        "preload asks for it: ModuleNotFoundError: No module named 'not_to_be_found'",
        "True",
        "return list(...)",
    ]


def test_ranks_meet_in_the_range_of_ports(tmp_path: Path) -> None:
    said = script(
        tmp_path,
        """
        import os
        import rallypoint

        # Of those that the kernel does not give out: nobody takes it before the second call does.
        with rallypoint.hold_port(port_range=(20000, 29999)) as held:
            port = held.port
            try:
                rallypoint.launch(int, port_range=(port, port))
            except rallypoint.EnvironmentProblem as error:
                print(error.code)
        print(rallypoint.launch(lambda: int(os.environ["MASTER_PORT"]), port_range=(port, port)) == [port])
        try:
            rallypoint.launch(int, port_range=(20100, 20000))
        except rallypoint.UsageError as error:
            print(error.code, error.headline)
        """,
    )
    assert said.splitlines() == [
        "ports-exhausted",
        "True",
        "port-invalid port_range=(20100, 20000) is no range of ports: two numbers from 1 to 65535, the smaller first",
    ]


def test_a_module_that_cannot_be_preloaded_is_said_every_time(tmp_path: Path) -> None:
    said = script(
        tmp_path,
        """
        import rallypoint

        for _ in range(3):
            try:
                rallypoint.launch(int, preload=["not_to_be_found"])
            except rallypoint.EnvironmentProblem as error:
                print(error.code, error.headline)
        """,
    )
    assert said == "start-failed not_to_be_found cannot be imported\n" * 3


def test_variables_that_the_caller_once_had_are_still_the_ranks_own(tmp_path: Path) -> None:
    said = script(
        tmp_path,
        """
        import os
        import rallypoint

        names = ["WORLD_SIZE", "RANK", "RALLYPOINT_JOB", "RP_ROUGH"]
        def look():
            return [name in os.environ for name in names]

        os.environ.update(dict.fromkeys(names, "7"))
        print(rallypoint.launch(look))
        for name in names:
            del os.environ[name]
        print(rallypoint.launch(look))
        """,
    )
    assert said == "[[True, True, True, True]]\n[[True, True, True, False]]\n"


def test_a_caller_without_standard_descriptors(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import os, sys
        said = os.open("said", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 30)
        os.closerange(0, 3)
        sys.stdout = sys.stderr = os.fdopen(30, "w", buffering=1)
        import rallypoint

        def work():
            os.write(1, b"one\\n")
            os.write(2, b"two\\n")
            return 3

        print(rallypoint.launch(work))
        print(rallypoint.launch(work))
        """,
    )
    assert (
        sorted((tmp_path / "said").read_text().splitlines())
        == ["[3]"] * 2 + ["one"] * 2 + ["two"] * 2
    )


def test_what_fits_no_packet_crosses(tmp_path: Path) -> None:
    said = script(
        tmp_path,
        """
        import os, sys
        import rallypoint

        sys.argv += ["x" * 100] * 5000
        print(rallypoint.launch(lambda: len(sys.argv)))
        sys.argv[1:] = [os.fsdecode(b"\\xff"), 7]  # no text: it ended the call
        os.makedirs(b"\\xfe")
        os.chdir(b"\\xfe")
        rallypoint.launch(int)
        print(rallypoint.launch(
            lambda: [*sys.argv[1:], os.getcwd()[-1], os.environ["RP_ROUGH"]] == ["\\udcff", "7", "\\udcfe", "\\udcfd"], env={"RP_ROUGH": "\\udcfd"}
        ))
        """,
    )
    assert said == "[5001]\n[True]\n"


def test_a_result_that_cannot_be_told_is_not_none(tmp_path: Path) -> None:
    said = script(
        tmp_path,
        """
        import os
        import rallypoint

        def closes():
            os.closerange(3, 4096)
            return 5

        try:
            print(rallypoint.launch(closes))
        except rallypoint.WorkerError as error:
            print("cannot tell its value" in str(error), error.exceptions[0].exit_code)
        """,
    )
    assert said == "True 1\n"


def test_a_working_directory_that_was_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(rallypoint.UsageError, match="removed"):
        rallypoint.launch(int)


def test_too_few_files_are_an_error_of_the_call(tmp_path: Path) -> None:
    """The launcher ended with a traceback of its own, and the call with launcher-died."""
    program = tmp_path / "program.py"
    program.write_text("import rallypoint\nrallypoint.launch(int)\n")
    shell = ["sh", "-c", 'ulimit -n 24; exec "$@"', "sh", sys.executable, str(program)]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 1), done.stderr
    assert "ulimit -n is 24" in done.stderr
    assert "explain files-exhausted" in done.stderr
    assert "/rallypoint/host/" not in done.stderr  # its source says nothing to who called


def test_runs_of_failed_calls_are_removed_as_others_and_latest_leads_somewhere(
    tmp_path: Path,
) -> None:
    said = script(
        tmp_path,
        """
        import os
        os.environ["XDG_STATE_HOME"] = os.path.abspath("state")
        import rallypoint
        from rallypoint.record import run_list

        run_folder_of = "state/rallypoint/runs"
        def fails():
            raise ValueError

        for _ in range(run_list.KEPT_RUNS + 3):
            try:
                rallypoint.launch(fails)
            except rallypoint.WorkerError:
                pass
        rallypoint.launch(int)
        names = set(os.listdir(run_folder_of))
        print(len(names - {"latest"}) <= run_list.KEPT_RUNS, os.path.isdir(run_folder_of + "/latest"))
        """,
    )
    assert said == "True True\n"


def test_the_last_words_of_sys_exit_are_shown(tmp_path: Path) -> None:
    said = script(
        tmp_path,
        """
        import sys
        import rallypoint

        try:
            rallypoint.launch(lambda: sys.exit("no such file"))
        except rallypoint.WorkerError as error:
            print("no such file" in str(error))
        """,
    )
    assert said == "True\n"


def test_daemons_of_ranks_leave_no_zombies(tmp_path: Path) -> None:
    said = script(
        tmp_path,
        """
        import os, time
        import rallypoint
        from rallypoint.launcher.launch import agent_pool

        def daemon():
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(600)
                os._exit(0)
            os.wait()

        for _ in range(3):
            rallypoint.launch(daemon)
        pid = agent_pool._idle[0].pid
        children = open(f"/proc/{pid}/task/{pid}/children").read().split()
        print([open(f"/proc/{child}/stat").read().rpartition(")")[2].split()[0] for child in children].count("Z"), len(children))
        """,
    )
    assert said == "0 2\n"


def test_a_child_that_was_forked_meanwhile_holds_up_nothing(tmp_path: Path) -> None:
    said = script(
        tmp_path,
        """
        import os, signal, threading
        import rallypoint
        from rallypoint.launcher.launch import agent_pool

        go, there = os.pipe(), os.pipe()
        def work(there):
            with open(there, "w") as file:  # a FIFO: the caller knows that the rank runs
                file.write("x")
            return 1

        os.mkfifo("there")
        results = []
        thread = threading.Thread(target=lambda: results.append(rallypoint.launch(work, (os.path.abspath("there"),))))
        thread.start()
        with open("there") as file:
            pid = os.fork()
            if pid == 0:
                signal.pause()
            file.read()
        thread.join()
        agent = agent_pool._idle.pop()
        agent.discard()
        try:
            os.kill(agent.pid, 0)
        except ProcessLookupError:
            print(results)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        """,
    )
    assert said == "[[1]]\n"


def test_a_stopped_agent_does_not_outlast_the_timeout(tmp_path: Path) -> None:
    said = script(
        tmp_path,
        """
        import os, signal, time
        import rallypoint
        from rallypoint.launcher.launch import call; from rallypoint.launcher.launch import agent_pool

        call.ANSWER_PATIENCE, call.STOPPED_INTERVAL, agent_pool.DISCARD_PATIENCE = 2.0, 600.0, 0.5

        def work():
            with open(f"/proc/{os.getppid()}/stat") as file:
                os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGSTOP)
            time.sleep(600)

        rallypoint.launch(int)
        try:
            rallypoint.launch(work, timeout=5)  # time to begin, on a busy machine
        except rallypoint.LaunchTimeout as error:
            print("does not answer" in str(error))
        print(rallypoint.launch(int))
        """,
    )
    assert said == "True\n[0]\n"


def test_a_stopped_agent_is_named_and_continued(tmp_path: Path) -> None:
    """Without a timeout such a call lasted for ever."""
    said = script(
        tmp_path,
        """
        import os, signal, sys, time
        import rallypoint

        def work():
            with open(f"/proc/{os.getppid()}/stat") as file:
                os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGSTOP)
            return 7

        sys.stderr = sys.stdout
        print(rallypoint.launch(work))
        """,
    )
    assert "was stopped (SIGSTOP): it is continued\n[7]\n" in said


def test_a_stopped_agent_ends_with_a_killed_caller(tmp_path: Path) -> None:
    """Agent, template, guard and host stayed, and held the caller's stdout: until then this
    script's output did not end.
    """
    path = tmp_path / "script.py"
    path.write_text(
        textwrap.dedent(
            """
            import os, signal, time
            import rallypoint

            def work(caller):
                with open(f"/proc/{os.getppid()}/stat") as file:
                    os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGSTOP)
                os.kill(caller, signal.SIGKILL)
                time.sleep(600)

            rallypoint.launch(work, (os.getpid(),))
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=60, check=False
    )  # until all have closed it
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("grace", [None, 3.0])
def test_a_rank_that_ignores_sigterm_does_not_outlast_the_timeout(
    tmp_path: Path, grace: float | None
) -> None:
    """The grace of 30 s came on top of the timeout."""
    said = script(
        tmp_path,
        f"""
        import signal, time
        import rallypoint

        def work():
            signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
            while True:
                time.sleep(1)

        rallypoint.launch(int)
        began = time.monotonic()
        try:
            rallypoint.launch(work, timeout={4 + (grace or 0)}, grace={grace})  # asked after 4 s
        except rallypoint.LaunchTimeout:
            print(time.monotonic() - began < 20)
        """,
    )
    assert said == "asked\nTrue\n"  # 34 s before


def test_words_beyond_the_callers_encoding_are_shown_escaped(tmp_path: Path) -> None:
    said = script(
        tmp_path,
        """
        import os, sys
        import rallypoint

        sys.stdout.reconfigure(encoding="ascii")
        rallypoint.launch(lambda: os.write(1, "\\u00e9\\n".encode()))
        """,
    )
    assert said == "\\xe9\n"


def test_a_module_that_launches_as_it_is_imported_does_not_start_itself_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            import os
            import rallypoint

            with open("imports", "a") as file:
                file.write("x")

            def work():
                return 1

            try:
                rallypoint.launch(work, preload=["mine"] if os.environ["RP_ROUGH"] == "preloaded" else [], timeout=60)
            except rallypoint.WorkerError as error:
                print("by an import of a module that work needs" in str(error))
            except rallypoint.EnvironmentProblem as error:
                print(error.code, error.headline)
            """
        )
    )
    assert script(tmp_path, "import os\nos.environ['RP_ROUGH'] = 'rank'\nimport mine\n") == "True\n"
    assert (
        script(tmp_path, "import os\nos.environ['RP_ROUGH'] = 'preloaded'\nimport mine\n")
        == "start-failed mine cannot be imported\n"
    )
    assert (tmp_path / "imports").read_text() == "x" * 4


def test_what_is_written_to_a_closed_stream_does_not_reach_the_agent(tmp_path: Path) -> None:
    """The socket to the agent was descriptor 1 then, and the agent ended of the words in it."""
    said = script(
        tmp_path,
        """
        import contextlib, os
        import rallypoint

        out = os.dup(1)
        os.close(1)
        for n in range(2):
            os.write(out, str(rallypoint.launch(lambda: 7, preload=["none"])).encode())
            with contextlib.suppress(OSError):
                os.write(1, b"words")
        """,
    )
    assert said == "[7][7]"


def test_ctrl_c_between_any_two_lines_leaves_nothing(tmp_path: Path) -> None:
    """A sample of all lines of the caller's side; the agent is a new one after most of them."""
    said = script(
        tmp_path,
        """
        import gc, os, select, sys, time
        import rallypoint
        from rallypoint.launcher.launch import call
        from rallypoint.launcher.launch import launch as function
        from rallypoint.launcher.launch import agent_pool

        files = (call.__file__, function.__file__, agent_pool.__file__)
        seen = at = 0

        def each(frame, event, argument):
            global seen
            if event == "line":
                seen += 1
                if seen == at:
                    raise KeyboardInterrupt
            return each

        def children():
            return open(f"/proc/self/task/{os.getpid()}/children").read().split()

        def settled():
            while agent_pool._idle:
                agent_pool._idle.pop().discard()
            gc.collect()
            deadline = time.monotonic() + 20
            while agent_pool._reap() or (children() and time.monotonic() < deadline):
                select.select([], [], [], 0.01)
            return len(os.listdir("/proc/self/fd")), children()

        before = settled()
        bad = []
        for at in [*range(29, 60, 9), *range(185, 335, 30)]:  # while an agent is taken; while it is at work
            seen = 0
            sys.settrace(lambda frame, event, argument: each if frame.f_code.co_filename in files else None)
            try:
                rallypoint.launch(int)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            if settled() != before:
                bad.append((at, settled()))
        print(bad)
        """,
    )
    assert said == "[]\n"


def test_what_failed_before_the_time_was_over_is_the_error(tmp_path: Path) -> None:
    said = script(
        tmp_path,
        """
        import signal, time
        import rallypoint

        def work(rank):
            if rank == 0:
                raise ValueError("no")
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            until = time.monotonic() + 12
            while time.monotonic() < until:
                time.sleep(0.1)

        rallypoint.launch(int, nproc=2)  # starts what stays warm
        try:
            rallypoint.launch(work, nproc=2, pass_rank=True, timeout=4, max_restarts=3)
        except rallypoint.WorkerError as error:
            print(error.exceptions)
        """,
    )
    assert said == "(ValueError('no'),)\n"


def test_ctrl_c_and_timeout_cut_the_grace_of_what_ranks_left_running(tmp_path: Path) -> None:
    said = script(
        tmp_path,
        """
        import os, signal, threading, time
        import rallypoint

        def leaves():
            ready, told = os.pipe()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.write(told, b".")
                time.sleep(600)
            os.read(ready, 1)
            return 1

        rallypoint.launch(int)
        began = time.monotonic()
        print(rallypoint.launch(leaves, timeout=6))
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            rallypoint.launch(leaves)
        except KeyboardInterrupt:
            print("interrupted", time.monotonic() - began < 25)  # the grace is 30 s
        """,
    )
    assert said == "[1]\ninterrupted True\n"


def test_a_reader_that_stands_still_loses_nothing(tmp_path: Path) -> None:
    said = script(
        tmp_path,
        """
        import sys, time
        import rallypoint

        class Slow:
            size = 0
            def write(self, text):
                if not self.size:
                    time.sleep(9)  # longer than a launcher waits for a terminal
                self.size += len(text)
            def flush(self):
                pass

        def speaks():
            for _ in range(30000):
                print("y" * 9)

        rallypoint.launch(int)
        slow, sys.stdout = Slow(), None
        sys.stdout = slow
        rallypoint.launch(speaks)
        sys.stdout = sys.__stdout__
        print(slow.size)
        """,
    )
    assert said == "300000\n"


def test_interrupted_and_failed_calls_keep_no_descriptor(tmp_path: Path) -> None:
    said = script(
        tmp_path,
        """
        import gc, os, signal, sys, threading, time
        import rallypoint

        gc.disable()
        def fails(rank):
            if rank:
                raise ValueError

        def interrupts(rank, caller):
            if rank:
                time.sleep(0.2)
                os.kill(caller, signal.SIGINT)
                time.sleep(600)

        rallypoint.launch(int, nproc=2)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            try:
                rallypoint.launch(fails, nproc=2, pass_rank=True)
            except rallypoint.WorkerError:
                pass
            try:
                rallypoint.launch(interrupts, (os.getpid(),), nproc=2, pass_rank=True)
            except KeyboardInterrupt:
                pass
        print(len(os.listdir("/proc/self/fd")) - before)
        """,
    )
    assert said == "0\n"


@pytest.mark.parametrize("files", ["none", "files", "sockets"])
@pytest.mark.parametrize("closed", ["all", "sockets", "others"])
def test_a_caller_that_closed_its_descriptors_keeps_what_it_opens_since(
    tmp_path: Path, files: str, closed: str
) -> None:
    """As a daemon does: the next call wrote into the program's own file or socket, or closed it."""
    said = script(
        tmp_path,
        f"""
        import contextlib, os, socket, stat
        import rallypoint

        def descriptors():
            return {{int(name) for name in os.listdir("/proc/self/fd")}}

        def launch():
            print(rallypoint.launch(os.getppid, nproc=2) and "launched")

        launch()
        for fd in descriptors():
            with contextlib.suppress(OSError):  # the one of the listing
                is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
                if fd > 2 and {closed!r} in ("all", "sockets" if is_socket else "others"):
                    os.close(fd)
        opened = []
        if {files!r} == "files":
            opened = [open(f"own{{number}}", "wb", buffering=0) for number in range(6)]
        if {files!r} == "sockets":
            opened = [end for _ in range(6) for end in socket.socketpair()]
        launch()
        launch()
        for end in opened:
            if {files!r} == "files":
                end.write(b"checkpoint")
            else:
                end.setblocking(False)
                try:
                    print("received", end.recv(100))
                except BlockingIOError:
                    pass
        for number in range(6 if {files!r} == "files" else 0):
            assert open(f"own{{number}}").read() == "checkpoint"
        while len(open(f"/proc/self/task/{{os.getpid()}}/children").read().split()) > 1:
            rallypoint.launch(int)  # the first agent ends by itself, and is reaped
        """,
    )
    assert said.splitlines() == ["launched"] * 3

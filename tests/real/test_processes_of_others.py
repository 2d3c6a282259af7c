"""What the launcher kills, and what it leaves alone; and what becomes of a job one of whose helpers
stands still.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from rallypoint.host.process_status import is_stopped

from .job import DEADLINE, RALLYPOINT, Result, environment, left_behind, run_job
from .test_supervision import events, helper, said, wait_for

SLEEPS = "import time; print('is up', flush=True); time.sleep(float(__import__('sys').argv[1]))"


def run_from_a_shell(before: str, arguments: list[str], state: Path) -> Result:
    """A shell that does something first and then becomes the launcher. What it starts must not have
    the test's mark.
    """
    command = shlex.join([sys.executable, "-P", "-m", "rallypoint", "run", *arguments])
    return run_job([f"{before}\nexec {command}"], launcher=["/bin/bash", "-c"], state=state)


@pytest.mark.usefixtures("without_torch")
def test_what_the_shell_had_started_before_it_became_the_launcher_is_left_alone(
    tmp_path: Path,
) -> None:
    """A container's entrypoint that starts a monitor and then executes the launcher lost the
    monitor: by SIGKILL, at the job's end and at each restart, since everything below the launcher
    counted as the job's. So did an orphan of the monitor's."""
    before = (
        f"cd {tmp_path}; env -i sleep 1003 >/dev/null 2>&1 & echo $! > monitor\n"
        "env -i /bin/sh -c 'setsid sleep 1003 & echo $! > orphan; exit' <&- >/dev/null 2>&1"
    )
    program = "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then exit 3; fi; kill -0 $(cat monitor orphan) && echo both live"
    result = run_from_a_shell(
        before,
        ["-n", "1", "--max-restarts", "1", "--no-python", "/bin/sh", "-c", program],
        tmp_path,
    )
    others = [int((tmp_path / name).read_text()) for name in ("monitor", "orphan")]
    for pid in others:
        os.kill(pid, signal.SIGKILL)  # ProcessLookupError: the launcher has killed it
    assert "both live" in result.out, result.everything
    assert result.rc == 0, result.everything


@pytest.mark.usefixtures("without_torch")
def test_a_log_shipper_behind_the_launcher_gets_every_line(tmp_path: Path) -> None:
    """`exec > >(tee log); exec rallypoint run`: the reader was killed with lines still in
    the pipe.
    """
    slow = "import sys, time\nfor line in sys.stdin:\n    time.sleep(0.001)\n    open('log', 'a').write(line)"
    before = f"cd {tmp_path}; exec > >(exec env -i {shlex.quote(sys.executable)} -c {shlex.quote(slow)}) 2>&1"
    run_from_a_shell(
        before, ["-n", "1", "--no-python", "/bin/sh", "-c", "seq 1000; echo LAST"], tmp_path
    )
    # The shipper has ended: it had the test's own pipe until then.
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line for line in lines if line.isdigit()] == [str(number) for number in range(1, 1001)]
    assert "LAST" in lines


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("killed", [False, True], ids=["it-ends-well", "the-launcher-is-killed"])
def test_a_daemon_without_its_mark_does_not_outlive_the_job(tmp_path: Path, killed: bool) -> None:
    """In a session of its own, with an empty environment and without a parent: after SIGKILL of the
    launcher such a one lived on.
    """

    def act(process: subprocess.Popen[bytes]) -> None:
        if killed:
            wait_for(lambda: (tmp_path / "up").exists(), "the daemon is up", process)
            os.kill(process.pid, signal.SIGKILL)

    inner = f"setsid env -i sleep 1005 & echo $! > {tmp_path}/daemon"
    script = f"({inner}); sleep 0.5; echo > {tmp_path}/up; {'sleep 1000' if killed else ':'}"
    run_job(["-n", "1", "--no-python", "/bin/sh", "-c", script], state=tmp_path, act=act)
    pid = int((tmp_path / "daemon").read_text())
    found = Path(f"/proc/{pid}/cmdline")
    assert not found.exists() or b"1005" not in found.read_bytes()


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("name", ["guard", "template"])
def test_a_helper_that_was_stopped_is_named_and_continued(tmp_path: Path, name: str) -> None:
    """The launcher waited for a stopped guard without an end; it never heard of the ends of ranks
    below a stopped template.
    """

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "is up", 2)
        os.kill(helper(tmp_path, name, process.pid), signal.SIGSTOP)

    result = run_job(
        ["-n", "2", "--no-python", sys.executable, "-uc", SLEEPS, "4"], state=tmp_path, act=act
    )
    assert result.rc == 0, result.everything
    assert f"rallypoint: the {name} (pid " in result.err
    assert "was stopped (SIGSTOP)" in result.err


class _Debugger:
    """Holds a process by ptrace, as gdb does. SIGCONT does not help against that."""

    def __init__(self, pid: int) -> None:
        code = (
            "import ctypes, os, sys, time\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.ptrace.argtypes = [ctypes.c_long] * 4\n"
            "pid = int(sys.argv[1])\nassert libc.ptrace(16, pid, 0, 0) == 0, ctypes.get_errno()\nos.waitpid(pid, 0)\n"
            "print('has it', flush=True)\ntime.sleep(1000)\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(pid)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "has it\n":
            self.end()
            pytest.skip("this machine does not let one process trace another")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("ending", ["well", "killed"])
@pytest.mark.parametrize("name", ["guard", "template"])
def test_a_helper_that_a_debugger_holds_hides_no_end(
    tmp_path: Path, name: str, ending: str
) -> None:
    """A guard is waited for at the end, and killed. A template told of no rank's end, and the
    launcher waited for its word until the debugger went.
    """
    held: list[_Debugger] = []

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "is up", 2)
        held.append(_Debugger(helper(tmp_path, name, process.pid)))
        (tmp_path / "go").write_text("")

    end = "os.kill(os.getpid(), 9)" if ending == "killed" else "sys.exit()"
    program = (
        "import os, sys, time\nprint('is up', flush=True)\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}):\n    time.sleep(0.05)\n"
        f"if os.environ['RANK'] == '1':\n    {end}\n"
    )
    try:
        result = run_job(
            ["-n", "2", "--no-python", sys.executable, "-uc", program], state=tmp_path, act=act
        )
    finally:
        for one in held:
            one.end()
    assert result.rc == (137 if ending == "killed" else 0), result.everything
    assert result.codes == (["rank-killed"] if ending == "killed" else [])
    assert ("does not tell that ranks have ended" in result.err) == (name == "template")


@pytest.mark.usefixtures("without_torch")
def test_helpers_that_were_stopped_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    """A stopped guard stayed, with its folders in TMPDIR, when the launcher was killed."""

    def act(process: subprocess.Popen[bytes]) -> None:
        said(tmp_path, process, "is up", 2)
        helpers = [helper(tmp_path, name, process.pid) for name in ("guard", "template")]
        for pid in (process.pid, *helpers):
            os.kill(pid, signal.SIGSTOP)
        os.kill(process.pid, signal.SIGKILL)

    folder = tmp_path / "tmp"
    folder.mkdir()
    arguments = ["-n", "2", "--no-python", sys.executable, "-uc", SLEEPS, "1000"]
    run_job(
        arguments, state=tmp_path, act=act, env={"TMPDIR": str(folder), "XDG_RUNTIME_DIR": ""}
    )  # fails when a process is left
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("without_torch")
def test_restarts_under_a_guard_that_reads_nothing_come_to_an_end(tmp_path: Path) -> None:
    """Each rank is told to the guard. When its socket was full the launcher waited for it without
    an end.
    """
    held: list[_Debugger] = []

    def act(process: subprocess.Popen[bytes]) -> None:
        wait_for(
            lambda: any(e["what"] == "template-started" for e in events(tmp_path)),
            "a template",
            process,
        )
        held.append(_Debugger(helper(tmp_path, "guard", process.pid)))
        (tmp_path / "go").write_text("")

    program = f"while ! [ -e {tmp_path}/go ]; do sleep 0.05; done; exit 3"
    try:
        result = run_job(
            ["-n", "4", "--max-restarts", "40", "--no-python", "/bin/sh", "-c", program],
            state=tmp_path,
            act=act,
        )
    finally:
        for one in held:
            one.end()
    assert result.rc in (3, 137), (
        result.everything
    )  # 137: a guard that reads nothing was killed, and the job ended with it


@pytest.mark.usefixtures("without_torch")
def test_ctrl_z_stops_the_ranks_and_fg_continues_them(tmp_path: Path) -> None:
    """Only the launcher stopped: its ranks, which have sessions of their own, went on computing,
    and reading the terminal.
    """
    marker = uuid.uuid4().hex
    command = [*RALLYPOINT, "-n", "2", "--no-python", sys.executable, "-uc", SLEEPS, "6"]
    with subprocess.Popen(
        command, env=environment(tmp_path, marker), preexec_fn=os.setpgrp, stdin=subprocess.DEVNULL
    ) as process:
        try:
            said(tmp_path, process, "is up", 2)
            ranks = [e["details"]["pid"] for e in events(tmp_path) if e["what"] == "worker-started"]
            os.kill(process.pid, signal.SIGTSTP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            wait_for(
                lambda: all(map(is_stopped, ranks)), "stopped ranks", process
            )  # each stops when it gets a processor
            os.killpg(process.pid, signal.SIGCONT)
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()  # it may be stopped, and would be waited for without an end
    assert not left_behind(marker)


@pytest.mark.usefixtures("without_torch")
@pytest.mark.root
@pytest.mark.parametrize("first", [True, False], ids=["the-first-process", "not-the-first"])
def test_numbers_of_another_pid_namespace_are_not_signalled(tmp_path: Path, first: bool) -> None:
    """Where /proc is another namespace's, SIGKILL was aimed at its numbers, with a line for each;
    or the job ended in an internal error.
    """
    command = shlex.join([*RALLYPOINT, "-n", "2", "--no-python", "/bin/true"])
    inner = ["bash", "-c", command if first else f"{command}; exit $?"]
    result = run_job([], launcher=["unshare", "--pid", "--fork", *inner], state=tmp_path)
    if "Operation not permitted" in result.err:
        pytest.skip("no namespaces here")
    assert result.rc == 0, result.everything
    assert "would not die" not in result.err
    assert "/proc shows another pid namespace" in result.err


@pytest.mark.usefixtures("without_torch")
@pytest.mark.root
def test_a_job_where_proc_hides_other_users_processes(tmp_path: Path) -> None:
    """With hidepid=1 their folders are there and cannot be opened: each job ended in an internal
    error.
    """
    user = "setpriv --reuid 65534 --regid 65534 --clear-groups" if shutil.which("setpriv") else ""
    python = shlex.quote(sys.executable)
    script = f"mount -t proc -o hidepid=1 proc /proc && {{ sleep 1006 & {user} {python} -c {shlex.quote(_FAMILY)}; kill %1; }}"
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "bash", "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    if not user or any(
        f"{word}:" in done.stderr
        for word in (
            "unshare", "mount", "bash", "setpriv", "ModuleNotFoundError",
            "error while loading shared libraries",  # a Python in root's home that was built shared
        )
    ):  # fmt: skip
        pytest.skip(f"no namespaces, or no Python for others here: {done.stderr[-200:]}")
    assert done.stdout == "[]\n", done.stderr


_FAMILY = f"import sys; sys.path[:0] = {sys.path!r}; from rallypoint.host import processes; print(processes.family(b'NO=SUCH', []))"


@pytest.mark.usefixtures("without_torch")
def test_what_the_kernel_lacks_is_said_once_and_by_name(tmp_path: Path) -> None:
    """Without pidfd_open each job was told "this is a fault in rallypoint"."""
    without = (
        "import errno, os, runpy, sys\nfrom rallypoint.host import system_calls\n"
        "def lacking(*_):\n    raise OSError(errno.ENOSYS, 'Function not implemented')\n"
        "system_calls.pidfd_open = lacking\nsys.argv[:] = ['rallypoint', 'run', '-n', '2', '--no-python', '/bin/true']\n"
        "runpy.run_module('rallypoint', run_name='__main__')"
    )
    result = run_job(["-c", without], launcher=[sys.executable], state=tmp_path)
    assert result.codes == ["start-failed"], result.everything
    assert "pidfd_open and pidfd_send_signal: Function not implemented" in result.prose


@pytest.mark.usefixtures("torch_in_parts")
@pytest.mark.root
def test_a_program_that_changes_its_root_ends_well(tmp_path: Path) -> None:
    """A look at gloo's threads, which it had never started, failed in a folder without /proc."""
    program = tmp_path / "changes.py"
    program.write_text(
        f"import torch.distributed, os\nos.makedirs({str(tmp_path / 'root')!r}, exist_ok=True)\nos.chroot({str(tmp_path / 'root')!r})\n"
    )
    result = run_job(["-n", "2", program], state=tmp_path)
    assert result.rc == 0, result.everything


@pytest.mark.usefixtures("without_torch")
def test_files_of_the_names_of_modules_that_connect_needs(tmp_path: Path) -> None:
    """`hmac.py` beside the script, or `shlex.py`: modules of the standard library that were imported
    late in a rank.
    """
    for name in sys.stdlib_module_names:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "connects.py").write_text(
        "import rallypoint\nwith rallypoint.connect() as store:\n    print(store.add('n'))\n"
    )
    result = run_job(["-n", "1", tmp_path / "connects.py"], state=tmp_path)
    assert result.rc == 0, result.everything


@pytest.mark.usefixtures("without_torch")
@pytest.mark.root
@pytest.mark.parametrize("missing", ["/dev/null", "/proc/self/fd"])
def test_what_the_machine_lacks_is_named(tmp_path: Path, missing: str) -> None:
    """Without /dev/null the error named Python's own file as missing; without /proc the guard ended
    with a traceback.
    """
    command = shlex.join([*RALLYPOINT, "-n", "2", "--no-python", "/bin/true"])
    folder = missing.split("/")[1]
    result = run_job(
        ["--mount", "bash", "-c", f"mount -t tmpfs none /{folder} && {command}"],
        launcher=["unshare"],
        state=tmp_path,
    )
    if "unshare:" in result.err or "mount:" in result.err:
        pytest.skip("no namespaces here")
    assert result.codes == ["start-failed"], result.everything
    assert missing in result.prose

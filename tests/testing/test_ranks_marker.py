"""`@pytest.mark.ranks`: a test's body on several ranks, its failure told as the test's own."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from .conftest import ROOT, run_pytest

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]

EXAMPLES = re.findall(
    r"```python\n(.*?)```",
    (ROOT / "docs" / "reference" / "testing.md")
    .read_text(encoding="utf-8")
    .partition("## Tests on several ranks")[2]
    .partition("\n## ")[0],
    re.DOTALL,
)


def outcome(
    folder: Path, installed: Path, text: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(textwrap.dedent(text))
    done = run_pytest(folder, installed, *arguments)
    assert done.stderr == ""
    return done


def test_the_examples_of_the_reference(tmp_path: Path, installed: Path) -> None:
    for number, example in enumerate(EXAMPLES):
        (tmp_path / f"test_{number}.py").write_text(example)
    done = run_pytest(tmp_path, installed)
    assert EXAMPLES
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.usefixtures("without_torch")
def test_what_ends_the_test_from_outside_shows_nothing_of_ours(
    tmp_path: Path, installed: Path
) -> None:
    """pytest-timeout fails a test from its handler: 160 lines of launch's source followed."""
    done = outcome(
        tmp_path,
        installed,
        """
        import signal, time
        import pytest

        @pytest.fixture
        def alarm():
            def ring(*_):
                pytest.fail("Timeout (>1.0s)")
            signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 1.0)

        @pytest.mark.ranks(2)
        def test_hangs(alarm):
            time.sleep(600)
        """,
    )
    assert (
        "Timeout (>1.0s) (timeout= of @pytest.mark.ranks says where each rank was)" in done.stdout
    )
    assert "launch.py" not in done.stdout, done.stdout


def test_bodies_run_on_all_ranks_with_parameters_fixtures_and_classes(
    tmp_path: Path, installed: Path
) -> None:
    done = outcome(
        tmp_path,
        installed,
        """
        import os
        import warnings
        import pytest

        @pytest.mark.ranks(3, backend="gloo")
        @pytest.mark.parametrize("factor", [1, 2])
        def test_sum(factor, tmp_path, store, monkeypatch):
            import torch
            import torch.distributed as dist

            value = torch.tensor([float(factor)])
            dist.all_reduce(value)
            assert value.item() == 3 * factor
            store.add("here")
            store.barrier("all", 3)
            assert store["here"] == 3
            monkeypatch.setenv("ONLY_HERE", "1")
            with pytest.warns(UserWarning, match="careful"):
                warnings.warn("careful")
            (tmp_path / os.environ["RANK"]).touch()

        @pytest.fixture
        def folder(tmp_path):
            yield tmp_path
            assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
            assert "RANK" not in os.environ

        @pytest.mark.ranks(2)
        class TestClass:
            def setup_method(self):
                self.value = 3

            def test_method(self, folder):
                assert self.value == 3
                (folder / os.environ["RANK"]).touch()
        """,
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


@pytest.mark.usefixtures("without_torch")
def test_a_failure_is_the_tests_own(tmp_path: Path, installed: Path) -> None:
    """The whole text: what the rank compared, the lines of the test, who said what."""
    done = outcome(
        tmp_path,
        installed,
        """
        import os
        import time
        import pytest

        def compare(found):
            assert found == [1, 2, 4]

        @pytest.mark.ranks(3)
        def test_fails():
            print("hello")
            if os.environ["RANK"] == "1":
                compare([1, 2, 3])
            time.sleep(60)
        """,
    )
    assert done.returncode == 1
    head, _, rest = done.stdout.partition("Captured stdout call")
    assert (
        head.partition("=\n")[2]
        == """\
__________________________________ test_fails __________________________________
rank 1:  (ranks 0 and 2 were stopped; they are not at fault)

    @pytest.mark.ranks(3)
    def test_fails():
        print("hello")
        if os.environ["RANK"] == "1":
>           compare([1, 2, 3])

test_it.py:13:\x20
_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _\x20

found = [1, 2, 3]

    def compare(found):
>       assert found == [1, 2, 4]
E       assert [1, 2, 3] == [1, 2, 4]
E        \x20
E         At index 2 diff: 3 != 4
E         Use -v to get more diff

test_it.py:7: AssertionError
----------------------------- """
    ), done.stdout
    assert "[1] hello\n" in rest
    assert "FAILED test_it.py::test_fails - rank 1: assert [1, 2, 3] == [1, 2, 4]" in rest


OUTCOMES = """
    import os
    import signal
    import time
    import pytest

    pytestmark = pytest.mark.ranks(2, timeout=60)

    def is_rank(number):
        return os.environ["RANK"] == str(number)

    def test_skip():
        if is_rank(1):
            pytest.skip("not today")
        time.sleep(60)

    def test_xfail():
        pytest.xfail("known")

    @pytest.mark.xfail(raises=LookupError)
    def test_expected():
        raise KeyError("lr")

    def test_killed():
        if is_rank(1):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    @pytest.mark.ranks(2, timeout=3)  # in which both come to their line
    def test_hang():
        time.sleep(60)

    def test_breakpoint():
        breakpoint()

    def test_left_well():
        raise SystemExit(0)

    def test_left_early():
        if is_rank(1):
            os._exit(0)

    def test_takes_its_rank_away(monkeypatch):
        monkeypatch.delenv("RANK")
        pytest.xfail("known")
"""


@pytest.mark.usefixtures("without_torch")
def test_every_other_end_of_a_rank(tmp_path: Path, installed: Path) -> None:
    done = outcome(tmp_path, installed, OUTCOMES, "-rA")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "SKIPPED [1] test_it.py:14: not today" in lines, done.stdout
    assert (
        "XFAIL test_it.py::test_xfail - reason: known" in lines
        or "XFAIL test_it.py::test_xfail - known" in lines
    ), done.stdout
    assert any(line.startswith("XFAIL test_it.py::test_expected") for line in lines), done.stdout
    assert "FAILED test_it.py::test_killed - rank 1 was killed by SIGKILL" in lines, done.stdout
    assert "error[rank-killed]: rank 1 was killed by SIGKILL" in lines
    assert any(
        line.startswith("FAILED test_it.py::test_hang - test_hang had returned in 0 of 2 ranks")
        for line in lines
    ), done.stdout
    assert "         - ranks 0-1  test_it.py:31 in test_hang" in lines, done.stdout
    assert (
        "E       RuntimeError: breakpoint() in a rank of a test: a rank has no terminal"
        in done.stdout
    ), done.stdout
    # What stands below an exit has not run: such a test had passed.
    assert "FAILED test_it.py::test_left_well - ranks 0-1: SystemExit: 0" in lines, done.stdout
    left_early = "error[rank-exited]: rank 1 exited with code 0 before its function returned"
    assert left_early in lines, done.stdout
    assert "1 skipped" in lines[-1]
    assert "3 xfailed" in lines[-1]  # also the one whose ranks do not know their number any more
    assert "passed" not in lines[-1]


MISUSES = """
    import threading
    import unittest
    import pytest

    @pytest.fixture
    def guarded():
        return {"lock": threading.Lock()}

    @pytest.mark.ranks(2)
    def test_lock(guarded): pass

    @pytest.mark.ranks(2)
    def test_capture(capsys): pass

    @pytest.mark.ranks
    def test_how_many(): pass

    @pytest.mark.ranks(2, backed="gloo")
    def test_misspelled(): pass

    @pytest.mark.ranks("2")
    def test_text(): pass

    @pytest.mark.ranks(2)
    async def test_later(): assert False

    @pytest.mark.ranks(2)
    class TestOld(unittest.TestCase):
        def test_old(self): pass
"""


@pytest.mark.usefixtures("without_torch")
def test_what_cannot_be_is_said(tmp_path: Path, installed: Path) -> None:
    done = outcome(tmp_path, installed, MISUSES)
    assert done.returncode == 1
    assert 'does not guard anything between processes: fixture guarded["lock"]\n' in done.stdout, (
        done.stdout
    )
    assert (
        "fixture capsys cannot cross into another process\n  why    fixtures are made in pytest's process"
        in done.stdout
    ), done.stdout
    assert (
        "test_how_many: @pytest.mark.ranks: it takes the number of ranks: @pytest.mark.ranks(4"
        in done.stdout
    ), done.stdout
    assert "test_misspelled: @pytest.mark.ranks: it has no argument backed: " in done.stdout, (
        done.stdout
    )
    assert (
        "ranks 0-1:\nan async function: @pytest.mark.ranks has run nothing of it" in done.stdout
    ), done.stdout
    assert (
        "test_old: @pytest.mark.ranks is for test functions and methods, and not for unittest.TestCase"
        in done.stdout
    ), done.stdout
    # Ninety lines of our own source stood before these words.
    assert "test_text: @pytest.mark.ranks: nproc='2': a number of ranks is an int" in done.stdout
    assert "During handling" not in done.stdout
    assert "launch.py" not in done.stdout, done.stdout
    assert "6 failed, 1 error" in done.stdout


@pytest.mark.usefixtures("without_torch")
def test_beside_xdist_and_to_the_first_failure(tmp_path: Path, installed: Path) -> None:
    pytest.importorskip("xdist")
    text = """
        import os
        import pytest

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("number", range(3))
        def test_number(number):
            assert number < 1 or os.environ["RANK"] == "0"
    """
    done = outcome(tmp_path, installed, text, "-n", "2")
    assert done.returncode == 1
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    assert (
        "FAILED test_it.py::test_number[1] - rank 1: AssertionError: assert (1 < 1 or"
        in done.stdout
    ), done.stdout
    done = outcome(tmp_path, installed, text, "-x")
    assert "1 failed, 1 passed" in done.stdout, done.stdout


@pytest.mark.usefixtures("without_torch")
def test_the_debugger_says_where_it_stands(tmp_path: Path, installed: Path) -> None:
    done = outcome(
        tmp_path,
        installed,
        "import pytest\n@pytest.mark.ranks(2)\ndef test_it():\n    assert 0\n",
        "--pdb",
    )
    assert "the ranks have ended: this is pytest's own process" in done.stdout, done.stdout


def test_the_marker_is_registered_and_costs_nothing(tmp_path: Path, installed: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import sys\ndef pytest_unconfigure(config): print(*sys.modules, file=sys.stderr)\n"
    )
    (tmp_path / "test_it.py").write_text("def test(): pass\n")
    done = run_pytest(tmp_path, installed, "--strict-markers")
    assert done.returncode == 0, done.stdout
    assert {*done.stderr.split()}.isdisjoint(
        {"torch", "rallypoint.testing.ranks", "rallypoint.launch", "msgspec", "cloudpickle"}
    )
    assert "@pytest.mark.ranks(nproc" in run_pytest(tmp_path, installed, "--markers").stdout

"""`rallypoint explain`: codes to pages, at once."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from rallypoint.cli import explain
from rallypoint.diagnosis.causes import CATALOGUE
from rallypoint.errors import UsageError


def test_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main(["rank-killed"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# rank-killed\n")
    assert "## How to fix it" in shown
    assert "<!--" not in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("word", ["error[rank-killed]:", "error[rank-killed]: rank 2 was killed by SIGKILL", "rank_killed", "RANK-KILLED"])
def test_a_code_as_it_was_copied(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([word]) == 0
    assert capsys.readouterr().out.startswith("# rank-killed\n")


def test_without_a_code_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(CATALOGUE)


def test_an_unknown_code_offers_the_nearest() -> None:
    with pytest.raises(UsageError, match="there is no code rank-kiled") as caught:
        explain.main(["rank-kiled"])
    assert caught.value.help[0] == ("the nearest is", "rallypoint explain rank-killed")


@pytest.mark.parametrize("word", ["Connection closed by peer", "-", "/dev/null", "RuntimeError: x"])
def test_messages_and_files_are_not_read_yet_and_it_says_so(word: str) -> None:
    with pytest.raises(UsageError, match="codes only"):
        explain.main([word])


def test_too_many_words() -> None:
    with pytest.raises(UsageError, match="one code"):
        explain.main(["rank-killed", "rank-raised"])


def test_nothing_heavy_is_imported() -> None:
    """What makes it answer in a tenth of a second."""
    program = (
        "import sys; from rallypoint.cli.main import main; main(['explain', 'rank-killed']); "
        "print(sorted({'torch', 'numpy', 'rich', 'psutil', 'asyncio', 'subprocess', 'multiprocessing'} & {*sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"


def test_it_answers_at_once() -> None:
    """The best of five beside the best of five of an interpreter that does nothing: the machine may be busy."""
    assert _best("-m", "rallypoint", "explain", "rank-killed") - _best("-c", "pass") < 0.12


def _best(*arguments: str) -> float:
    def once() -> float:
        began = time.monotonic()
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, timeout=60, check=True)
        return time.monotonic() - began

    return min(once() for _ in range(5))

"""Every code has a page, every page its four parts and a script."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from rallypoint import errors
from rallypoint.diagnosis.catalogue import (
    CATALOGUE,
    QUESTIONS,
    cuda_in_template,
    nearest,
    page,
    spawn_inside_run,
)
from rallypoint.store.client.connect_errors import CODES
from rallypoint.wire.messages import FAILURES, REFUSALS

ROOT = pathlib.Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "rallypoint"
PARTS = ["What you see", "Why it happens", "How to make sure", "How to fix it"]


@pytest.mark.parametrize("code", CATALOGUE)
def test_a_page_has_its_four_parts_and_a_script(code: str) -> None:
    text = page(code)
    assert text.startswith(f"# {code}\n")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[:4] == PARTS
    sections = re.split(r"^## .*$", text, flags=re.MULTILINE)[1:5]
    assert all(section.strip() for section in sections)
    # A report has the code in brackets, an exception in a program of one's own in the last line
    # that Python prints of it.
    assert f"[{code}]: " in sections[0] or f"more   rallypoint explain {code}\n" in sections[0]
    note = re.search(r"^<!-- (produces|not produced): (.+) -->$", text, re.MULTILINE)
    assert note, "neither a command that produces it nor the reason why there is none"
    assert ("```python script.py" in text) == (note.group(1) == "produces")


def test_there_is_no_page_without_a_code() -> None:
    assert {path.stem for path in (SOURCE / "diagnosis" / "explain").iterdir()} == set(CATALOGUE)


def test_every_code_in_the_source_is_in_the_catalogue() -> None:
    """Reports and exceptions name their code as a literal: `code="..."`, or the first argument of
    one of our exceptions.
    """
    ours = "|".join(
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.RallypointError)
    )
    made = re.compile(
        rf"(?:\bcode=|(?:{ours}|_told|_of_end)\(\s*(?:case,\s*)?)\"([a-z]+(?:-[a-z]+)*)\""
    )
    found = {
        code: path
        for path in SOURCE.rglob("*.py")
        for code in made.findall(path.read_text(encoding="utf-8"))
    }
    assert len(found) > 15
    assert {code: str(path) for code, path in found.items() if code not in CATALOGUE} == {}


def test_every_code_that_a_store_may_say_is_in_the_catalogue() -> None:
    """These stand in the protocol, and become an exception's code on the client."""
    inside = {"bad-request"}  # becomes internal-error
    assert {*FAILURES, *REFUSALS, *CODES.values()} - set(CATALOGUE) == inside


def test_the_questions_in_the_documentation_are_those_of_the_package() -> None:
    in_package = {
        path.stem: path.read_text(encoding="utf-8")
        for path in (SOURCE / "diagnosis" / "questions").glob("*.md")
    }
    assert in_package == {
        path.stem: path.read_text(encoding="utf-8")
        for path in (ROOT / "docs" / "questions").glob("*.md")
    }
    assert set(QUESTIONS) == set(in_package)


def test_the_pages_for_the_documentation_are_made_by_a_script(tmp_path: pathlib.Path) -> None:
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "error_pages.py", tmp_path], check=True, timeout=60
    )
    assert {path.stem for path in tmp_path.iterdir()} == {*CATALOGUE, "README"}
    index = (tmp_path / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[([a-z0-9-]+)\]\(\1\.md\) \| (.+) \|$", index, re.MULTILINE)
    assert sorted(listed) == sorted((cause.code, cause.meaning) for cause in CATALOGUE.values())


def test_codes_that_are_nearly_right() -> None:
    assert nearest("rank-kiled") == ("rank-killed",)
    assert nearest("rank-rased") == ("rank-raised",), "others are much less alike"
    assert nearest("Rank Killed")[0] == "rank-killed"
    assert "rank-out-of-memory" in nearest("memory")
    assert nearest("xyzzy") == ()


def test_warnings_name_the_place_and_what_to_type() -> None:
    spawn = spawn_inside_run("train.py:30", 4, "train.py")
    assert spawn.headline == "each of the 4 ranks starts ranks of its own at train.py:30"
    assert spawn.help[0].command == "rallypoint run -n 1 train.py"
    unclean = cuda_in_template("ops", "ops/cuda.py:12", "CUDA is initialised")
    assert unclean.where == "ops/cuda.py:12"
    assert "ops" in unclean.headline
    assert (spawn.exit_status, unclean.exit_status) == (0, 0)

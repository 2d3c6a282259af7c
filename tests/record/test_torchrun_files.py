"""What `@record` wrote in a rank, handed on to whoever has started the launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rallypoint.record.torchrun_files import hand_on


@pytest.mark.parametrize(
    ("written", "handed"),
    [
        ({"message": {"message": "seven"}}, {"message": {"message": "seven", "errorCode": 3}}),
        ({"message": "another format"}, {"message": "another format"}),
        (["no error file"], ["no error file"]),
    ],
)
def test_the_exit_code_is_put_into_the_error_file(
    tmp_path: Path, written: object, handed: object
) -> None:
    assert hand_on(json.dumps(written), 3, str(tmp_path / "mine.json")) == ""
    assert json.loads((tmp_path / "mine.json").read_text()) == handed


def test_what_is_no_json_is_handed_on_as_it_is(tmp_path: Path) -> None:
    assert hand_on("{", 3, str(tmp_path / "mine.json")) == ""
    assert (tmp_path / "mine.json").read_text() == "{"


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    assert hand_on("{}", 3, str(tmp_path / "no" / "mine.json")) == "No such file or directory"

"""How a program leaves by itself, and what is told of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..real.job import run_job

PARSER = """\
import argparse, sys

parser = argparse.ArgumentParser(prog="train")
parser.add_argument("--lr", type=float, required=True)

def main():
    args = parser.parse_args()
    if args.lr < 0:
        parser.error(f"--lr: {args.lr} is below 0")
    sys.exit("no data: /data is empty\\nmount it first")

main()
"""


@pytest.mark.parametrize(
    ("arguments", "headline", "place"),
    [
        ([], "exited with code 2: the following arguments are required: --lr", "train.py:7 in main"),
        (["--lr", "x"], "exited with code 2: argument --lr: invalid float value: 'x'", "train.py:7 in main"),
        (["--lr=-1"], "exited with code 2: --lr: -1.0 is below 0", "train.py:9 in main"),
        (["--lr=1"], "exited with code 1: no data: /data is empty", "train.py:10 in main"),
    ],
)
def test_what_the_program_left_by_is_told_with_its_own_line(tmp_path: Path, arguments: list[str], headline: str, place: str) -> None:
    (tmp_path / "train.py").write_text(PARSER)
    result = run_job(["-n", "2", "train.py", *arguments], state=tmp_path, cwd=tmp_path)
    assert re.match(rf"error\[rank-exited\]: (both ranks|rank [01]) {re.escape(headline)}\n", result.report), result.everything
    assert f"  where  {place}, pid " in result.report, result.everything

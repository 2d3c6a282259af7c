"""Try rallypoint with other versions of torch and Python, and keep the results in docs/reference/versions.md.

Run by scripts/matrix with any Python >= 3.11; only the standard library is there. For each pair of versions it copies the
tracked files into a folder of their own, lets scripts/environment.py make .venv there, runs the parts, writes what came of
them into the table, and removes the folder: one build of torch for CUDA takes 6 GB.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "versions.md"

TORCH = ("2.8.0", "2.9.1", "2.11.0", "2.13.0", "2.15.0")
"""The oldest that pyproject.toml promises, some between, and the newest."""
PYTHON = ("3.11", "3.12", "3.13")

LONGEST = 7200.0
"""Seconds after which a part is given up: tests/real takes half an hour on two processors that others use, too."""

NOT_TRIED = "not tried"

Table = dict[tuple[str, str], dict[str, str]]
"""By torch and Python: what came of each part."""


def ddp(python: str, say: Callable[[list[str]], int]) -> str:
    """A plain DDP script, with 1 and 2 ranks, by template and in fresh interpreters."""
    run = [str(Path(python).with_name("rallypoint")), "run"]
    script = ["examples/digits_ddp.py", "--epochs", "2"]
    ways = {
        f"{way or 'template'} -n {count}": [*run, *way.split(), "-n", count, *script]
        for way in ("", "--fresh")
        for count in "12"
    }
    failed = [name for name, command in ways.items() if say(command)]
    return f"{', '.join(failed)} failed" if failed else "ok"


def demo(python: str, say: Callable[[list[str]], int]) -> str:
    """What scripts/demo runs."""
    status = say([python, "-I", "scripts/train_digits.py"])
    return f"failed, exit status {status}" if status else "ok"


def tests(folder: str) -> Callable[[str, Callable[[list[str]], int]], str]:
    """The tests in a folder; what is said of them comes from pytest's last line."""

    def run(python: str, say: Callable[[list[str]], int]) -> str:
        four = ["--numprocesses", "4", "--dist", "worksteal"]  # as scripts/test has it
        status = say([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *four, folder])
        return "ok" if status == 0 else f"failed, exit status {status}"

    return run


PARTS = {
    "ddp": ddp,
    "demo": demo,
    "questions": tests("tests/questions"),
    "real": tests("tests/real"),
}


def read_table(page: str) -> Table:
    """The results that the page has."""
    rows = re.findall(r"^\| (\d[\w.+]*) \| (\d[\d.]*) \| (.*) \|$", page, re.MULTILINE)
    return {
        (torch, python): dict(zip(PARTS, cells.split(" | "), strict=True))
        for torch, python, cells in rows
    }


def write_table(page: str, table: Table) -> str:
    """The page with these results; pairs of versions that nobody has tried are in it, too."""
    pairs = {(torch, python) for torch in TORCH for python in PYTHON} | table.keys()
    lines = [f"| torch | Python | {' | '.join(PARTS)} |", "|---" * (2 + len(PARTS)) + "|"]
    for pair in sorted(
        pairs,
        key=lambda pair: [
            [int(number) for number in re.findall(r"\d+", version)] for version in pair
        ],
    ):
        cells = table.get(pair, {})
        lines.append(f"| {' | '.join((*pair, *(cells.get(part, NOT_TRIED) for part in PARTS)))} |")
    return re.sub(
        r"^\| torch \|.*?\|$(?!\n\|)",
        lambda _: "\n".join(lines),
        page,
        count=1,
        flags=re.MULTILINE | re.DOTALL,
    )


def summary(output: str) -> str:
    """pytest's own count: "2 failed, 40 passed"; "" when it got to none."""
    lines = re.findall(r"^(?:=+ )?((?:\d+ \w+(?:, )?)+) in [\d.]+s", output, re.MULTILINE)
    counts = lines[-1].split(", ") if lines else []
    return ", ".join(count for count in counts if not re.search(r"warnings?$", count))


def find(version: str) -> str | None:
    """The Python of this version, "3.12", on PATH or among pyenv's; None when there is none."""
    ours = os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))
    installed = sorted(
        Path(ours, "versions").glob(f"{version}.*/bin/python"),
        key=lambda path: [int(n) for n in re.findall(r"\d+", str(path))],
    )
    candidates = [f"python{version}", *map(str, reversed(installed))]
    for candidate in candidates:
        command = [
            candidate,
            "-I",
            "-c",
            "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])",
        ]
        try:
            answer = subprocess.run(
                command, capture_output=True, text=True, check=False
            ).stdout.strip()
        except OSError:
            continue
        if answer == version:
            return candidate
    return None


def copy_tracked(into: Path) -> None:
    """The files of this checkout as they are now, those that git would not keep left out."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, names.stdout.split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)


def attempt(torch: str, python: str, parts: Sequence[str], logs: Path) -> dict[str, str]:
    """Make the environment and run these parts in it: what came of each."""
    today = datetime.date.today().isoformat()
    found = find(python)
    if found is None:
        print(f"there is no Python {python} here")
        return {}
    with tempfile.TemporaryDirectory(prefix=f"rallypoint-torch-{torch}-python-{python}-") as folder:
        checkout = Path(folder) / "checkout"
        copy_tracked(checkout)
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RALLYPOINT", "PYTHON"))
        }
        environment |= {
            "PYTHON": found,
            "RALLYPOINT_TORCH": f"torch=={torch}",
            "RALLYPOINT_WHOLE_TORCH": "1",
            "XDG_STATE_HOME": str(Path(folder) / "state"),
        }

        def say(command: list[str]) -> int:
            with log.open("ab") as file:
                file.write(f"$ {' '.join(command)}\n".encode())
                file.flush()
                try:
                    done = subprocess.run(
                        command, cwd=checkout, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False,
                        timeout=LONGEST,
                    )  # fmt: skip
                except subprocess.TimeoutExpired:
                    file.write(f"given up after {LONGEST:.0f} s\n".encode())
                    return 124
            return done.returncode

        log = logs / f"torch-{torch}-python-{python}-install.log"
        log.write_text("")
        if say([found, "-I", "-B", str(checkout / "scripts" / "environment.py"), "demo", "dev"]):
            print(f"torch {torch}, Python {python}: cannot be installed; {log}", flush=True)
            return dict.fromkeys(parts, f"cannot be installed, {today}")
        results = {}
        for part in parts:
            log = logs / f"torch-{torch}-python-{python}-{part}.log"
            log.write_text("")
            outcome = PARTS[part](str(checkout / ".venv" / "bin" / "python"), say)
            counted = summary(log.read_text("utf-8", "replace"))
            results[part] = f"{counted or outcome}, {today}"
            print(f"torch {torch}, Python {python}, {part}: {results[part]}; {log}", flush=True)
        return results


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--torch",
        action="append",
        metavar="VERSION",
        help=f"may be given again; default: {', '.join(TORCH)}",
    )
    parser.add_argument(
        "--python",
        action="append",
        metavar="X.Y",
        help=f"may be given again; default: {', '.join(PYTHON)}",
    )
    parser.add_argument(
        "--only",
        default=",".join(PARTS),
        metavar="PARTS",
        help="of %(default)s, which is the default",
    )
    parser.add_argument(
        "--logs",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="the folder for the output of each part",
    )
    options = parser.parse_args(arguments)
    parts = options.only.split(",")
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"--only: there is no part {', '.join(sorted(unknown))}")
    options.logs.mkdir(parents=True, exist_ok=True)
    good = True
    for torch in options.torch or TORCH:
        for python in options.python or PYTHON:
            results = attempt(torch, python, parts, options.logs.resolve())
            good &= bool(results) and not any(
                re.search(r"failed|error|cannot", result) for result in results.values()
            )
            page = PAGE.read_text("utf-8")
            table = read_table(page)
            table.setdefault((torch, python), {}).update(results)
            PAGE.write_text(write_table(page, table), "utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

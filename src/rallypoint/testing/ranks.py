"""`@pytest.mark.ranks(4)`, pytest's side: a test's body goes to its ranks, and what became of it
comes back as the test's own outcome.

A failure is shown by the rank that had it, with pytest's own means (`in_rank.py`): there are the
frames, the source and the values that a rewritten assert compared. Here it is put into the test's
report.
"""

from __future__ import annotations

import functools
import os
import pickle
import re
import shutil
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

import pytest
from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback
from _pytest.unittest import TestCaseFunction

from rallypoint.diagnosis.report import Report
from rallypoint.errors import LaunchTimeout, RallypointError, UsageError, WorkerError
from rallypoint.testing import in_rank
from rallypoint.testing.in_rank import Setting, Told
from rallypoint.world import ranges

TIMEOUT = 300.0
"""Seconds for the body of a test that says nothing else: a hang is to fail, and to say where each
rank was, before CI gives up.
"""

OPTIONS = frozenset({"nproc", "backend", "timeout", "backend_timeout", "env", "preload"})

PRELOAD = ("pytest",)
"""Most test modules import it, and a rank shows its failure with it."""

_INIS = (
    "truncation_limit_lines",
    "truncation_limit_chars",
    "assertion_text_diff_style",
)  # those that pytest's comparison asks for

_PLACE = re.compile(r'kwargs\["given"\]\["(\w+)"\]')

shown_key = pytest.StashKey[Any]()
"""Key of the text that a failed test's report shows instead of the caller's own traceback."""

skipped_key = pytest.StashKey[tuple[str, int]]()
"""File and line where a rank skipped the test."""


def run(item: pytest.Function, marker: pytest.Mark) -> None:
    """Run the body on its ranks; raises what the causing rank raised, and skips where a
    rank did.
    """
    __tracebackhide__ = True
    import rallypoint

    wanted = _wanted(item, marker)
    given = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    for name, value in given.items():
        if _is_pytests(value):
            _refuse(
                item,
                UsageError(
                    "launch-argument",
                    f'kwargs["given"]["{name}"] cannot cross into another process',
                ),
            )
    folder = item._request.getfixturevalue("tmp_path_factory").mktemp(
        "ranks"
    )  # of a failed test pytest keeps it for a while
    try:
        rallypoint.launch(
            in_rank.Body(item.name),
            kwargs={
                "body": _bare(item.obj),
                "given": given,
                "setting": _setting(item, str(folder)),
            },
            nproc=wanted.pop("nproc"),
            run_dir=folder / "run",
            preload=(*PRELOAD, *wanted.pop("preload", ())),
            **{"timeout": TIMEOUT, **wanted},
        )
    except WorkerError as error:
        _conclude(item, error, _read(folder))
    except RallypointError as error:
        _refuse(item, error)
    except pytest.fail.Exception as error:  # of pytest-timeout: it knows this process alone
        told = f"{error.msg} (timeout= of @pytest.mark.ranks says where each rank was)"
        raise pytest.fail.Exception(told, False) from None
    except TypeError as error:  # of `launch` itself, about a value in the marker
        raise pytest.fail.Exception(f"{item.name}: @pytest.mark.ranks: {error}", False) from None
    shutil.rmtree(folder, ignore_errors=True)


def check(item: pytest.Item) -> None:
    """Fail a test that has the marker and would be run once, here, in silence."""
    if not isinstance(item, pytest.Function) or isinstance(item, TestCaseFunction):
        pytest.fail(
            f"{item.name}: @pytest.mark.ranks is for test functions and methods, and not for unittest.TestCase or doctests",
            False,
        )


def show(item: pytest.Item, report: pytest.TestReport) -> None:
    """Put what a rank said into the report of the test's call."""
    if report.failed and shown_key in item.stash:
        report.longrepr = item.stash[shown_key]
    elif report.skipped and skipped_key in item.stash and isinstance(report.longrepr, tuple):
        report.longrepr = (*item.stash[skipped_key], report.longrepr[2])


def _is_pytests(value: object) -> bool:
    """Tell whether a fixture is a part of pytest's own process: request, capsys, caplog, ... A
    monkeypatch may go: what it does in a rank ends with the rank."""
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).startswith("_pytest.") and not isinstance(value, pytest.MonkeyPatch)


def _wanted(item: pytest.Function, marker: pytest.Mark) -> dict[str, Any]:
    wanted = dict(marker.kwargs)
    if len(marker.args) == 1:
        wanted.setdefault("nproc", marker.args[0])
    unknown = wanted.keys() - OPTIONS
    if len(marker.args) > 1 or "nproc" not in wanted or unknown:
        what = (
            f"it has no argument {', '.join(sorted(unknown))}"
            if unknown
            else "it takes the number of ranks"
        )
        pytest.fail(
            f'{item.name}: @pytest.mark.ranks: {what}: @pytest.mark.ranks(4, backend="gloo", timeout=60)',
            False,
        )
    return wanted


def _bare(body: Any) -> Any:
    """The function without its marks: what they hold (parameters of other tests) need not cross."""
    if type(body) is not FunctionType or not hasattr(body, "pytestmark"):
        return body
    bare = FunctionType(
        body.__code__, body.__globals__, body.__name__, body.__defaults__, body.__closure__
    )
    functools.update_wrapper(bare, body)
    bare.__kwdefaults__ = body.__kwdefaults__
    del bare.__dict__["__wrapped__"], bare.__dict__["pytestmark"]
    return bare


def _setting(item: pytest.Function, folder: str) -> Setting:
    config = item.config
    inis = {}
    for name in _INIS:
        try:
            inis[name] = config.getini(name)
        except (ValueError, KeyError):  # not an option of this pytest
            continue
    plain = (str, int, float, bool, type(None))
    return Setting(
        folder=folder,
        path=str(item.path),
        started_in=str(config.invocation_params.dir),
        options={
            name: value for name, value in vars(config.option).items() if isinstance(value, plain)
        },
        inis=inis,
        filters=list(warnings.filters),
    )


def _read(folder: Path) -> dict[int, Told]:
    told = {}
    for path in folder.glob("rank*.told"):
        told[int(path.stem.removeprefix("rank"))] = pickle.loads(path.read_bytes())
    return told


# --- the outcome ---


def _conclude(item: pytest.Function, error: WorkerError, told: dict[int, Told]) -> NoReturn:
    __tracebackhide__ = True
    members = dict(zip(error.ranks, error.exceptions, strict=True))
    failed = [rank for rank in members if rank not in told or told[rank].kind == "failed"]
    if not failed:
        one = told[error.ranks[0]]
        if one.kind == "skipped":
            item.stash[skipped_key] = one.place
            pytest.skip(one.message)
        if one.kind == "xfailed":
            pytest.xfail(one.message)
        pytest.exit(one.message)
    cause = failed[0]
    report = error.report
    assert isinstance(report, Report)
    if cause in told and told[cause].shown is not None:
        alike = [
            rank for rank in failed if rank in told and told[rank].message == told[cause].message
        ]
        item.stash[shown_key] = _shown(told[cause].shown, alike, len(failed), report)
    else:
        item.stash[shown_key] = _text(item, str(error), report.headline)
    raise members[cause] from None


def _refuse(item: pytest.Function, error: RallypointError) -> NoReturn:
    """Nothing was started, or time was up."""
    __tracebackhide__ = True
    if isinstance(error, UsageError) and (found := _PLACE.search(error.headline)):
        error = UsageError(
            error.code,
            _PLACE.sub(r"fixture \1", error.headline),
            why=(
                *(_PLACE.sub(r"\1", line) for line in error.why),
                "fixtures are made in pytest's process, and copied into each rank",
            ),
            help=error.help
            or (
                (
                    f"leave {found[1]} out of a test with ranks, or make what it needs in the test's body",
                    "",
                ),
            ),
        )
    text = "".join(traceback.format_exception_only(error))
    if isinstance(error, LaunchTimeout):
        text = str(error).replace(
            "rallypoint.launch(..., timeout=None)", "@pytest.mark.ranks(..., timeout=None)"
        )
    item.stash[shown_key] = _text(item, text, error.headline)
    raise error from None


def _shown(shown: Any, ranks: Sequence[int], failed: int, report: Report) -> Any:
    """Return the rank's own display of its failure, with the rank in front."""
    who = f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"
    lines = [f"{who}:  ({report.then})" if report.then else f"{who}:"]
    if failed > len(ranks):
        lines.append(f"({failed - len(ranks)} more failed in other ways)")
    shown.reprtraceback.reprentries.insert(0, ReprEntryNative([f"{line}\n" for line in lines]))
    if shown.reprcrash is not None:
        shown.reprcrash.message = f"{who}: {shown.reprcrash.message}"
    return shown


def _text(item: pytest.Function, text: str, message: str) -> Any:
    """A report of ours as pytest shows a failure: as it is, and its first line in the summary."""
    path, line, _ = item.reportinfo()
    location = ReprFileLocation(os.fspath(path), (line or 0) + 1, message)
    entry = ReprEntryNative([f"{one}\n" for one in text.splitlines()])
    return ReprExceptionInfo(
        reprtraceback=ReprTraceback([entry], None, style="native"), reprcrash=location
    )

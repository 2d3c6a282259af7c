"""`@pytest.mark.ranks(4)`, a rank's side: run the test's body, and show a failure as pytest does,
where its frames are.

Only a rank imports pytest's inner parts here: what it shows with is `ExceptionInfo.getrepr`, which
is public; how a comparison is explained is not, and where another pytest does that otherwise, the
assert's plain explanation is left.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import warnings
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

_EXPLAINED_LINES, _CUT_FROM = (
    8,
    12,
)  # of a comparison, without -vv: as pytest does, which since version 9 cuts before we see it


@dataclass(frozen=True, slots=True)
class Setting:
    """Facts of pytest's process that a rank needs."""

    folder: str
    path: str  # the test's file
    started_in: str
    options: dict[str, Any]
    inis: dict[str, Any]
    filters: list[Any]


@dataclass(frozen=True, slots=True)
class Told:
    """End of the body in a rank. `shown`: pytest's representation of the failure."""

    kind: Literal["failed", "skipped", "xfailed", "exit"]
    message: str
    shown: Any = None
    place: tuple[str, int] = field(default=("", 0))


class Body:
    """The function that is launched. It has the test's name, which reports show."""

    def __init__(self, name: str) -> None:
        self.__qualname__ = name

    def __call__(
        self, *, body: Callable[..., object], given: dict[str, Any], setting: Setting
    ) -> None:
        """Run `body(**given)` to its end."""
        __tracebackhide__ = True
        sys.breakpointhook = _no_breakpoint
        _explain_comparisons(setting)
        warnings.filters[:] = setting.filters  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        rank = os.environ["RANK"]  # the body may take it away
        try:
            returned = body(**given)
            if isinstance(returned, Awaitable | AsyncIterable):
                import pytest

                __tracebackhide__ = False  # pytest takes the place of a failure from such a frame
                pytest.fail(
                    "an async function: @pytest.mark.ranks has run nothing of it; asyncio.run(...) in a plain test does",
                    pytrace=False,
                )
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            _tell(setting, rank, error)
            if isinstance(error, SystemExit) and error.code in (None, 0):
                sys.exit(1)  # in a test without ranks it is a failure, too
            raise


def _no_breakpoint(*_: object, **__: object) -> NoReturn:
    __tracebackhide__ = True
    raise RuntimeError(
        "breakpoint() in a rank of a test: a rank has no terminal; rallypoint run --debug-rank R gives one to a script's rank"
    )


def _tell(setting: Setting, rank: str, error: BaseException) -> None:
    import pytest

    kind: Literal["failed", "skipped", "xfailed", "exit"] = "failed"
    if isinstance(error, pytest.skip.Exception):
        kind = "skipped"
    elif isinstance(error, pytest.xfail.Exception):
        kind = "xfailed"
    elif isinstance(error, pytest.exit.Exception):
        kind = "exit"
    message = str(getattr(error, "msg", ""))
    if kind == "failed":
        message = f"{type(error).__qualname__}: {error}"
    place = ("", 0)
    shown = None
    try:
        info = pytest.ExceptionInfo.from_exception(error)
        shown = _shown(info, setting)
        if shown.reprcrash is not None:
            place = (shown.reprcrash.path, shown.reprcrash.lineno)
        data = pickle.dumps(Told(kind, message, shown if kind == "failed" else None, place))
    except Exception as problem:
        # a __repr__ that raises in a way that pytest does not expect: the report is shown instead
        data = pickle.dumps(
            Told(
                kind,
                f"{message} (not shown as pytest does: {type(problem).__name__}: {problem})",
                None,
                place,
            )
        )
    path = os.path.join(setting.folder, f"rank{rank}")
    with open(path, "wb") as file:
        file.write(data)
    os.rename(path, f"{path}.told")  # a rank may be stopped in the middle


def _shown(info: Any, setting: Setting) -> Any:
    import pytest

    options = setting.options
    full = bool(options.get("fulltrace"))
    style = options.get("tbstyle", "auto")
    entries = info.traceback
    if not full:
        kept = entries.cut(
            path=setting.path
        )  # our own frames stand before those of the test's file
        entries = (kept if len(kept) < len(entries) else entries).filter(info)
        if style == "auto" and len(entries) > 2:
            entries = type(entries)(
                (entries[0], *(one.with_repr_style("short") for one in entries[1:-1]), entries[-1])
            )
        info.traceback = entries
    if isinstance(info.value, pytest.fail.Exception) and not info.value.pytrace:
        style, full = "value", False
    return info.getrepr(
        funcargs=True,
        abspath=os.getcwd() != setting.started_in,
        showlocals=bool(options.get("showlocals")),
        style="long" if full or style == "auto" else style,
        tbfilter=not full,
        truncate_locals=int(options.get("verbose") or 0) <= 1,
    )


# --- comparisons ---


class _Config:
    """As much of pytest's config as its explanation of a comparison asks for."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def get_verbosity(self, kind: str | None = None) -> int:
        return int(self._setting.options.get("verbose") or 0)

    def getoption(self, name: str, default: Any = None, skip: bool = False) -> Any:
        return self._setting.options.get(name, default)

    getvalue = getoption

    def getini(self, name: str) -> Any:
        return self._setting.inis[name]

    @property
    def pluginmanager(self) -> _Config:
        return self

    def has_plugin(self, name: str) -> bool:
        return False  # none that writes to a terminal: no colours

    def get_terminal_writer(self) -> Any:
        from _pytest._io import TerminalWriter

        return TerminalWriter(io.StringIO())


def _explain_comparisons(setting: Setting) -> None:
    try:
        from _pytest.assertion import pytest_assertrepr_compare, util
    except ImportError:
        return
    config: Any = _Config(setting)

    def explain(op: str, left: object, right: object) -> str | None:
        try:
            lines = list(
                pytest_assertrepr_compare(config=config, op=op, left=left, right=right) or ()
            )
        except (
            Exception
        ):  # another pytest asks for more of its config: then there is no explanation
            return None
        if not lines:
            return None
        if len(lines) >= _CUT_FROM and config.get_verbosity() < 2 and "CI" not in os.environ:
            lines = [
                *lines[:_EXPLAINED_LINES],
                "",
                f"...{len(lines) - _EXPLAINED_LINES} lines hidden, use '-vv' to show",
            ]
        text = "\n~".join(line.replace("\n", "\\n") for line in lines)
        return (
            text.replace("%", "%%")
            if config.getoption("assertmode", "rewrite") == "rewrite"
            else text
        )

    util._reprcompare = explain

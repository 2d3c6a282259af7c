"""Every exception, one tree: whose fault it was.

`UsageError`: rallypoint was called wrongly. `EnvironmentProblem`: this machine (a port, an address, a file).
`InternalError`: us; it asks for a report. Each carries the code under which `rallypoint explain` has a page.
"""

from __future__ import annotations


class RallypointError(Exception):
    """The root of the tree.

    `code` is the kebab-case name of the situation, `help` what to do about it: (sentence, command or "") pairs.
    """

    def __init__(self, code: str, headline: str, *, why: tuple[str, ...] = (), help: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(headline)
        self.code = code
        self.headline = headline
        self.why = why
        self.help = help


class UsageError(RallypointError, ValueError):
    """rallypoint was called wrongly; nothing was started. Exit status 2."""


class EnvironmentProblem(RallypointError):
    """This machine cannot give what was asked for: a port, an address, memory, a device."""


class InternalError(RallypointError):
    """A fault in rallypoint itself. Exit status 70; the message says what to report."""

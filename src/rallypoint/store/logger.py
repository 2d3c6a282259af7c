"""The logger `rallypoint`: silent in a program that has not set up logging, unless RALLYPOINT_LOG
asks for it.
"""

from __future__ import annotations

import logging
import os
import sys

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def logger(*, loud: bool = False) -> logging.Logger:
    """Return the logger, with a handler: one that writes to stderr when RALLYPOINT_LOG names a
    level or `loud` is set, else one that does nothing (without it, Python would print warnings to
    stderr). A program's own handlers are left alone."""
    log = logging.getLogger("rallypoint")
    if log.handlers and not (
        loud and all(isinstance(handler, logging.NullHandler) for handler in log.handlers)
    ):
        return log
    wanted = os.environ.get("RALLYPOINT_LOG", "").upper()
    if wanted not in LEVELS and not loud:
        log.addHandler(logging.NullHandler())
        return log
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("rallypoint: %(levelname)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(wanted if wanted in LEVELS else "WARNING")
    log.propagate = False  # it has been printed
    return log


def notice(text: str) -> None:
    """Write a warning for the person in front of this program: also printed where logging is not
    set up. Nobody asks for a log beforehand in order to learn that an address has a typing error.
    """
    log = logger()
    log.warning(text)
    if log.isEnabledFor(logging.WARNING) and sys.stderr and not _is_handled(log):
        print(f"rallypoint: {text}", file=sys.stderr, flush=True)


def _is_handled(log: logging.Logger | None) -> bool:
    while log is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in log.handlers):
            return True
        log = log.parent if log.propagate else None
    return False

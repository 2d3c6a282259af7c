"""The logger `rallypoint`: silent in a program that has not set up logging, unless RALLYPOINT_LOG asks for it."""

from __future__ import annotations

import logging
import os

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def logger(*, loud: bool = False) -> logging.Logger:
    """The logger, with a handler: one that writes to stderr when RALLYPOINT_LOG names a level or `loud` is set, else one that does
    nothing (without it, Python would print warnings to stderr). A program's own handlers are left alone."""
    log = logging.getLogger("rallypoint")
    if log.handlers and not (loud and all(isinstance(handler, logging.NullHandler) for handler in log.handlers)):
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

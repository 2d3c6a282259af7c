"""The command `rallypoint`, also as `python -m rallypoint`."""

from __future__ import annotations

# First of all, before anything else is imported: until the agent writes signals down itself, Ctrl-C
# ends this process as it ends any other program. Python's KeyboardInterrupt in the middle of
# somebody's import is a traceback, an ignored exception or, inside an extension module's
# initialisation, a crash. `_signal` is the interpreter's own module and is there already.
import _signal  # type: ignore[import-not-found]
import gc
import sys

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
# `python -m` puts the working directory first, where a user's `random.py` may be.
if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]
# What imports make stays: to look for garbage in it is a tenth of the start.
gc.set_threshold(20_000)


def main() -> int:
    """Arguments from the command line; the exit status."""
    from rallypoint.cli.main import main as command

    status = command()
    gc.freeze()  # or the interpreter, at its end, looks for garbage in all that was imported
    return status


if __name__ == "__main__":
    sys.exit(main())

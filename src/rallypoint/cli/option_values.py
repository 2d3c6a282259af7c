"""An option's text to its value, a function for each kind: `ValueError` says what is wrong, as the
end of a sentence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator

from rallypoint.errors import UsageError
from rallypoint.launcher.sizes import LARGEST_LOCAL_SIZE

ALIKE = 0.7
"""Likeness of two names by difflib's measure: one letter left out, doubled or swapped gives 0.8 and
more, and `config-file` has 0.67 in common with `on-failure`."""


def nearest(word: str, words: Iterable[str], alike: float = ALIKE) -> str:
    """Return the word that is most like `word`; "" when none is."""
    import difflib

    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=alike)), "")


def _whole(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"is not {what}") from None


def read_nproc(text: str) -> int | str:
    if text in ("auto", "cpu", "gpu"):
        return text
    if text == "xpu":
        raise ValueError("cannot be counted without torch: give their number")
    count = _whole(text, "a number of ranks, nor auto, cpu or gpu")
    if count < 1:
        raise ValueError("starts no rank")
    if count > LARGEST_LOCAL_SIZE:
        raise ValueError(f"is more than one node can have: at most {LARGEST_LOCAL_SIZE}")
    return count


def read_count(text: str) -> int:
    count = _whole(text, "a whole number")
    if count < 0:
        raise ValueError("is less than 0")
    return count


def read_integer(text: str) -> int:
    return _whole(text, "a whole number")


def read_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError("is not a number of seconds") from None
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError("is not a number of seconds from 0 up")
    return seconds


def read_patience(text: str) -> float:
    seconds = read_seconds(text)
    if 0 < seconds < 1:
        raise ValueError(
            "is less than a second, and every rank stands still that long now and then; 0 means never"
        )
    return seconds


def read_port(text: str) -> int:
    port = _whole(text, "a port number")
    if not 0 <= port <= 65535:
        raise ValueError("is not a port: they go from 1 to 65535, and 0 means any free one")
    return port


def read_port_range(text: str) -> tuple[int, int]:
    ends = re.fullmatch(r"(\d+)[-:](\d+)", text)
    if not ends:
        raise ValueError(
            "is one port, and a range has two ends"
            if text.isdecimal()
            else "is not a range of ports"
        )
    low, high = int(ends[1]), int(ends[2])
    if not 1 <= low <= 65535 or not 1 <= high <= 65535:
        raise ValueError("is not a range of ports: they go from 1 to 65535")
    if low > high:
        raise ValueError("ends before it starts")
    return low, high


def read_choice(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"is not one of {', '.join(choices)}")
        return text

    return read


def read_modules(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not is_module_name(name):
            raise ValueError(f"names {name!r}, which is not a module's name")
    return names


def read_streams(text: str) -> int | dict[int, int]:
    """torchrun's stream maps: `3`, or `0:1,1:2`. torchrun's own stop at local rank 9; ours
    do not.
    """
    if text in ("0", "1", "2", "3"):
        return int(text)
    by_rank: dict[int, int] = {}
    for part in text.split(","):
        pair = re.fullmatch(r"\s*(\d+):([0-3])\s*", part)
        if not pair:
            raise ValueError(
                "is neither 0 (none), 1 (stdout), 2 (stderr), 3 (both) nor such a choice for each local rank"
            )
        by_rank[int(pair[1])] = int(pair[2])
    return by_rank


def read_ranks(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    try:
        ranks = {int(part) for part in text.split(",")}
    except ValueError:
        raise ValueError("is not a list of local ranks") from None
    if min(ranks) < 0:
        raise ValueError("names a rank below 0")
    return tuple(sorted(ranks))


def read_words(text: str) -> tuple[str, ...]:
    """Comma-separated; two commas stand for one that belongs to a word."""
    return tuple(word.replace("\0", ",") for word in text.replace(",,", "\0").split(","))


def read_signals(text: str) -> tuple[str, ...]:
    """The names as they were given; `unknown_signals` are left out later, with a line: torchrun
    warns of them and runs.
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name in (
            "SIGKILL",
            "SIGSTOP",
            "SIGCHLD",
        ):  # the last one tells the launcher of its children
            raise ValueError(f"names {name}, which no launcher can take for this")
    return names


def read_notices(text: str) -> tuple[str, ...]:
    """Signals that are handed on to the ranks, as `USR1` or `SIGUSR1`; `none` is none."""
    import signal

    if text.strip() == "none":
        return ()
    names = tuple(
        dict.fromkeys("SIG" + part.strip().upper().removeprefix("SIG") for part in text.split(","))
    )
    for name in names:
        if name in ("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGINT", "SIGTSTP"):
            raise ValueError(f"names {name}, which no launcher can take for this")
    for _, wrong in unknown_signals(names):
        raise ValueError(wrong)
    assert all(name in signal.Signals.__members__ for name in names)
    return names


def unknown_signals(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Those that are no signals, each with what is wrong with it, as the end of a sentence."""
    import signal

    numbered = {str(one.value): one.name for one in signal.Signals}
    for name in names:
        if name not in signal.Signals.__members__:
            long = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
            near = numbered.get(name) or (nearest(long, signal.Signals.__members__) if name else "")
            yield (
                name,
                f"names {name!r}, which is not a signal"
                + (f"; the nearest is {near}" if near else ""),
            )


def read_nodes(text: str) -> tuple[int, int]:
    """`N` or `MIN:MAX`."""
    ends = [_whole(part, "a number of nodes, nor MIN:MAX") for part in text.split(":")]
    if len(ends) > 2:
        raise ValueError("is not a number of nodes, nor MIN:MAX")
    low, high = ends[0], ends[-1]
    if low < 1:
        raise ValueError("is less than one node")
    if high < low:
        raise ValueError("ends before it starts")
    return low, high


_NO_ENDPOINT = "is not HOST or HOST:PORT"


def read_endpoint(text: str) -> tuple[str, int]:
    """`HOST[:PORT]` with the port 0 when there is none; `[::1]:29500` for IPv6. A URL stands for
    itself.
    """
    text = text.strip()
    if not text:
        return "", 0
    if "://" in text:
        return _checked_place(text), 0
    parts = re.fullmatch(
        r"(?:\[([^\]]+)\]|([\w.-]+|[0-9a-fA-F:]*::[0-9a-fA-F:.]*))(?::(\d+))?", text
    )
    if not parts:
        raise ValueError(_NO_ENDPOINT)
    return _checked_host(parts[1] or parts[2]), read_port(parts[3] or "0")


def _checked_place(url: str) -> str:
    """A URL as it was given. Of `file://` ones the path must be whole; other schemes are for
    several nodes, and refused later.
    """
    if url.startswith("file://"):
        path = url.removeprefix("file://")
        if not path.startswith("/"):
            raise ValueError(
                f"takes {path.partition('/')[0]!r} for a host: a whole path has three slashes, file:///{path}"
            )
        if not path.strip("/"):
            raise ValueError("names no place")
    return url


def read_address(text: str) -> str:
    text = text.strip()
    if re.fullmatch(_WITH_PORT, text):
        raise ValueError("is an address with a port, and the port is given with --master-port")
    return _checked_host(text[1:-1] if text.startswith("[") and text.endswith("]") else text)


_WITH_PORT = r"[^:]+:\d+|\[.*\]:\d+"


def _checked_host(host: str) -> str:
    """A host as it was given. What no resolver can be asked for makes Python's raise an exception
    that is no `OSError`.
    """
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(
            "names no host: a label between its dots is empty, longer than 63 letters, or no text"
        ) from None
    return host


def read_host(text: str) -> str:
    if re.fullmatch(_WITH_PORT, text.strip()):
        raise ValueError("is an address with a port, and the port is given with --port")
    host = read_address(text)
    if not host or any(letter.isspace() for letter in host):
        raise ValueError("is not an address to listen on")
    return host


def read_path(text: str) -> str:
    if not text:
        raise ValueError("is not a file's name")
    return text


def read_backend(text: str) -> str:
    if not text:
        raise ValueError("names no way to meet")
    return text


def read_size(text: str) -> int:
    from rallypoint.store.limits import size

    try:
        return size(text)
    except UsageError:
        raise ValueError("is not a size in bytes") from None


def read_settings(text: str) -> tuple[str, ...]:
    settings = tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    if not all(re.fullmatch(r"[^=]+=.+", setting) for setting in settings):
        raise ValueError("is not KEY=VALUE,KEY=VALUE")
    return settings


def read_checks(text: str) -> tuple[str, ...]:
    """Names of the doctor's lines."""
    from rallypoint.diagnosis.doctor.doctor import NAMES

    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in NAMES:
            near = nearest(name.lower(), NAMES)
            raise ValueError(
                f"names no check {name!r}"
                + (f"; the nearest is {near}" if near else f": there are {', '.join(NAMES)}")
            )
    return names


def read_peer(text: str) -> tuple[str, int]:
    """`HOST:PORT`, both said."""
    try:
        host, port = read_endpoint(text) if text.strip() else ("", 0)
    except ValueError as error:
        if str(error) != _NO_ENDPOINT:
            raise ValueError(
                str(error).partition(", and 0")[0]
            ) from None  # any free port, on another machine, is nobody's
        host, port = "", 0
    if "://" in host or not host or not port:
        raise ValueError(
            "is not HOST:PORT, of a machine where rallypoint doctor --listen PORT runs"
        )
    return host, port


def is_module_name(text: str) -> bool:
    """Whether `text` could be imported: identifiers with dots between."""
    return all(part.isidentifier() for part in text.split("."))

"""An option's text to its value, a function for each kind: `ValueError` says what is wrong, as the
end of a sentence.
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator

from rallypoint.errors import UsageError
from rallypoint.launcher.sizes import LARGEST_LOCAL_SIZE, LONGEST_WAIT

ALIKE = 0.7
"""Likeness of two names by difflib's measure: one letter left out, doubled or swapped gives 0.8 and
more, and `config-file` has 0.67 in common with `on-failure`."""


SHORTEST_NODE_TIMEOUT, LONGEST_NODE_TIMEOUT = 0.5, 60.0
"""Seconds. A healthy node that is kept from running for half a second would be lost; a minute is
what a person waits.
"""


def nearest(word: str, words: Iterable[str], alike: float = ALIKE) -> str:
    """Return the word that is most like `word`; "" when none is."""
    import difflib

    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=alike)), "")


def hint_at(near: str) -> str:
    """Return the end of a sentence about an unknown name."""
    return f"; the nearest is {near}" if near else ""


def _whole(text: str, what: str = "a whole number") -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"is not {what}") from None


def _parts(text: str) -> tuple[str, ...]:
    """Split at commas, without repetitions."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


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
    count = _whole(text)
    if count < 0:
        raise ValueError("is less than 0")
    return count


def read_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError("is not a number of seconds") from None
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError("is not a number of seconds from 0 up")
    return min(seconds, LONGEST_WAIT)


def read_patience(text: str) -> float:
    seconds = read_seconds(text)
    if 0 < seconds < 1:
        raise ValueError(
            "is less than a second, and every rank stands still that long now and then; 0 means never"
        )
    return seconds


_ANY_FREE = ", and 0 means any free one"


def read_port(text: str) -> int:
    port = _whole(text, "a port number")
    if not 0 <= port <= 65535:
        raise ValueError(f"is not a port: they go from 1 to 65535{_ANY_FREE}")
    return port


def read_port_range(text: str) -> tuple[int, int]:
    ends = re.fullmatch(r"(\d+)[-:](\d+)", text)
    if not ends:
        is_one = text.isdecimal()
        raise ValueError(
            "is one port, and a range has two ends" if is_one else "is not a range of ports"
        )
    low, high = int(ends[1]), int(ends[2])
    if not (1 <= low <= 65535 and 1 <= high <= 65535):
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
    names = _parts(text)
    for name in names:
        if not is_module_name(name):
            raise ValueError(f"names {name!r}, which is not a module's name")
    return names


def read_streams(text: str) -> int | dict[int, int]:
    """Read torchrun's stream maps: `3`, or `0:1,1:2`, of any local rank (torchrun's stop at 9)."""
    if text in ("0", "1", "2", "3"):
        return int(text)
    pairs = [re.fullmatch(r"(\d+):([0-3])", part.strip()) for part in text.split(",")]
    if None in pairs:
        raise ValueError(
            "is neither 0 (none), 1 (stdout), 2 (stderr), 3 (both) nor such a choice for each local rank"
        )
    return {int(pair[1]): int(pair[2]) for pair in pairs if pair}


def read_ranks(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    ranks = {_whole(part, "a list of local ranks") for part in text.split(",")}
    if min(ranks) < 0:
        raise ValueError("names a rank below 0")
    return tuple(sorted(ranks))


def read_words(text: str) -> tuple[str, ...]:
    """Split at commas; two commas stand for one that belongs to a word."""
    return tuple(word.replace("\0", ",") for word in text.replace(",,", "\0").split(","))


_NEVER_HANDLED = ("SIGKILL", "SIGSTOP", "SIGCHLD")
"""Signals that cannot be handled, and the one that tells the launcher of its children."""


def read_signals(text: str, never: tuple[str, ...] = _NEVER_HANDLED) -> tuple[str, ...]:
    """Return the names as they were given. Unknown ones are left out later, with a line: torchrun
    warns of them and runs.
    """
    names = _parts(text)
    for name in names:
        if name in never:
            raise ValueError(f"names {name}, which no launcher can take for this")
    return names


def read_notices(text: str) -> tuple[str, ...]:
    """Read signals that are handed on to the ranks, as `USR1` or `SIGUSR1`; `none` is none."""
    if text.strip() == "none":
        return ()
    long = ",".join("SIG" + part.upper().removeprefix("SIG") for part in _parts(text))
    names = read_signals(long, (*_NEVER_HANDLED, "SIGINT", "SIGTSTP"))
    for _, wrong in unknown_signals(names):
        raise ValueError(wrong)
    return names


def unknown_signals(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the names that are no signals, each with what is wrong, as the end of a sentence."""
    known = signal.Signals.__members__
    numbered = {str(one.value): one.name for one in signal.Signals}
    for name in names:
        if name not in known:
            long = "SIG" + name.upper().removeprefix("SIG")
            near = numbered.get(name) or (nearest(long, known) if name else "")
            yield name, f"names {name!r}, which is not a signal{hint_at(near)}"


def read_nodes(text: str) -> int:
    """Read `N`, or torchrun's `MIN:MAX` when both are one number."""
    what = "a number of nodes, nor MIN:MAX"
    low, *rest = (_whole(part, what) for part in text.split(":"))
    if len(rest) > 1:
        raise ValueError(f"is not {what}")
    high = rest[0] if rest else low
    if low < 1:
        raise ValueError("is less than one node")
    if high < low:
        raise ValueError("ends before it starts")
    if high != low:
        raise ValueError("is a range: jobs whose number of nodes changes are not built yet")
    return low


def read_node_timeout(text: str) -> float:
    seconds = read_seconds(text)
    if not SHORTEST_NODE_TIMEOUT <= seconds <= LONGEST_NODE_TIMEOUT:
        raise ValueError(
            f"is not between {SHORTEST_NODE_TIMEOUT:g} and {LONGEST_NODE_TIMEOUT:g} seconds"
        )
    return seconds


def read_endpoint(text: str) -> tuple[str, int]:
    """Read `HOST[:PORT]`, the port 0 when there is none; `[::1]:29500` for IPv6. A URL stands for
    itself: `file://` is a place, other schemes are refused later.
    """
    text = text.strip()
    if "://" in text:
        scheme, _, path = text.partition("://")
        if scheme == "file" and not path.startswith("/"):
            raise ValueError(
                f"takes {path.partition('/')[0]!r} for a host: a whole path has three slashes, file:///{path}"
            )
        if scheme == "file" and not path.strip("/"):
            raise ValueError("names no place")
        return text, 0
    parts = re.fullmatch(
        r"(?:\[([^\]]+)\]|([\w.-]+|[0-9a-fA-F:]*::[0-9a-fA-F:.]*))(?::(\d+))?", text
    )
    if text and not parts:
        raise ValueError("is not HOST or HOST:PORT")
    return (_checked_host(parts[1] or parts[2]), read_port(parts[3] or "0")) if parts else ("", 0)


def read_address(text: str, port_option: str = "--master-port") -> str:
    text = text.strip()
    if re.fullmatch(r"[^:]+:\d+|\[.*\]:\d+", text):
        raise ValueError(f"is an address with a port, and the port is given with {port_option}")
    return _checked_host(text[1:-1] if text.startswith("[") and text.endswith("]") else text)


def _checked_host(host: str) -> str:
    """Return a host as it was given. `ValueError` for a text that makes Python's resolver raise an
    exception that is no `OSError`.
    """
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError(
            "names no host: a label between its dots is empty, longer than 63 letters, or no text"
        ) from None
    return host


def read_host(text: str) -> str:
    host = read_address(text, "--port")
    if not host or any(letter.isspace() for letter in host):
        raise ValueError("is not an address to listen on")
    return host


def read_path(text: str) -> str:
    if not text:
        raise ValueError("is not a file's name")
    return text


def read_log_dir(text: str) -> str:
    if text and text != os.devnull and os.path.exists(text) and not os.path.isdir(text):
        raise ValueError("is not a folder")
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
    settings = _parts(text) if text.strip() else ()
    if not all(re.fullmatch(r"[^=]+=.+", setting) for setting in settings):
        raise ValueError("is not KEY=VALUE,KEY=VALUE")
    return settings


def read_checks(text: str) -> tuple[str, ...]:
    """Read names of the doctor's lines."""
    from rallypoint.diagnosis.doctor.doctor import NAMES

    names = _parts(text)
    for name in names:
        if name not in NAMES:
            hint = hint_at(nearest(name.lower(), NAMES)) or f": there are {', '.join(NAMES)}"
            raise ValueError(f"names no check {name!r}{hint}")
    return names


def read_peer(text: str) -> tuple[tuple[str, int]]:
    """Read `HOST:PORT`, where another machine's doctor listens."""
    try:
        host, port = read_endpoint(text) if re.search(r".:\d+$", text) else ("", 0)
    except ValueError as error:
        raise ValueError(str(error).removesuffix(_ANY_FREE)) from None
    if "://" in host or not host or not port:
        raise ValueError(
            "is not HOST:PORT, of a machine where rallypoint doctor --listen PORT runs"
        )
    return ((host, port),)


def is_module_name(text: str) -> bool:
    """Tell whether `text` could be imported: identifiers with dots between."""
    return all(part.isidentifier() for part in text.split("."))

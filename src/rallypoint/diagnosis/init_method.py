"""What is wrong with an `init_method` as it is written.

A module of its own: every rank asks before it lets torch try, and needs nothing else of this
layer's rules for that.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from rallypoint.diagnosis.report import Help, Report


def check(url: str) -> Report | None:
    """Return what is wrong with an `init_method` as it is written, with the corrected text; None
    when nothing is known to be.
    """
    scheme, _, rest = url.partition(":")
    problem = correct = ""
    if scheme == "file":
        host, path = urlsplit(url).netloc, urlsplit(url).path
        if host:
            problem = f"{host!r} is taken for a host there, and the file for {path or '/'}"
            correct = f"file:///{host}{path}" if host not in (".", "..") else ""
        elif not path.strip("/"):
            problem = "it names no file"
    elif scheme == "tcp":
        problem, correct = _check_tcp(rest)
    elif scheme in ("http", "https"):
        problem, correct = "torch meets over tcp:// or file://, not over HTTP", "tcp:" + rest
        if _check_tcp(rest)[0]:
            correct = _check_tcp(rest)[1]
    elif re.fullmatch(r"[\w.-]+:\d+", url):
        problem, correct = "the tcp:// before it is missing", f"tcp://{url}"
    elif not urlsplit(url).scheme:  # torch: "No rendezvous handler for ://"
        problem = "it says not how to meet: tcp://, file:// or env:// must stand before it"
        correct = f"file://{url}" if url.startswith("/") else "env://" if url == "env" else ""
    if not problem:
        return None
    right = correct or "tcp://HOST:PORT"
    write = Help("write", f'init_method="{right}"')
    if scheme == "file" and not correct:
        whole = "write the whole path, with three slashes"
        write = Help(whole, 'init_method="file:///shared/folder/name"')
    return Report(
        code="init-method-invalid",
        headline=f'init_method="{url}" cannot work: {problem}',
        help=(write, Help("or leave init_method out: rallypoint sets the address")),
    )


def _check_tcp(rest: str) -> tuple[str, str]:
    """Return the problem with what follows `tcp:`, and the corrected whole; ("", "") when there is
    none.
    """
    place = rest.lstrip("/")
    netloc, mark, query = place.partition("?")
    netloc = netloc.rstrip("/")
    tail = mark + query
    host, colon, port = netloc.rpartition(":") if not netloc.endswith("]") else (netloc, "", "")
    if not colon:
        host, port = netloc, ""
    if not host:
        return "it names no host", f"tcp://127.0.0.1:{port}{tail}" if is_port(port) else ""
    if not port:
        return "it names no port", f"tcp://{host}:29500{tail}"
    if not is_port(port):
        return f"{port} is no port; they go from 1 to 65535", f"tcp://{host}:29500{tail}"
    if not rest.startswith("//") or rest.startswith("///"):
        return "two slashes belong before the host", f"tcp://{netloc}{tail}"
    return "", ""


def is_port(text: str) -> bool:
    """Tell whether this is the number of a port, as it is written in an address."""
    return text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535

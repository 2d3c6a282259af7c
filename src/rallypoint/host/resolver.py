"""Ask this machine's resolver for names and addresses, within a deadline.

getaddrinfo cannot be interrupted, by a signal or by a deadline: a name server that is switched off
holds it for half a minute. So it is called in a process of its own, which asks for everything at
once, a thread for each question, and is killed when the time is up. A thread in the caller would go
on asking, and a launcher that forks must have none.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from rallypoint.clock import Clock

# Standard library alone, and little of it: the process answers 20 ms after its start.
_PROGRAM = """
import json, os, socket, sys, threading
def tell(asked, found, error):
    os.write(1, json.dumps([asked, found, error]).encode() + b"\\n")
def ask(kind, asked):
    try:
        if kind == "name":
            found = [entry[4][0] for entry in socket.getaddrinfo(asked, None, type=socket.SOCK_STREAM)]
        else:
            name, others, _ = socket.gethostbyaddr(asked)
            found = [name, *others]
        tell(asked, list(dict.fromkeys(found)), "")
    except OSError as error:
        tell(asked, [], error.strerror or str(error))
    except ValueError:  # a label of more than 63 characters, an empty one, a zero byte: the resolver is not asked
        tell(asked, [], "it cannot be the name of a host")
def leave():  # when whoever asks is killed: nobody else would end this before the name server answers
    os.read(0, 1)
    os._exit(1)
threading.Thread(target=leave, daemon=True).start()
threads = [threading.Thread(target=ask, args=question) for question in json.loads(sys.argv[1])]
for thread in threads:
    thread.start()
"""

_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the resolver about one name (`found`: addresses) or one address (`found`:
    names)."""

    asked: str
    found: tuple[str, ...] = ()  # without repetitions, in the resolver's order
    error: str = (
        ""  # its words when it found nothing; "" with nothing found: no answer before the deadline
    )
    took: float = 0.0  # seconds until the answer, or until nobody waited any more

    @property
    def silent(self) -> bool:
        """No answer came before the deadline."""
        return not self.found and not self.error

    def __str__(self) -> str:
        if self.found:
            return f"{self.asked} is {', '.join(self.found)}"
        return (
            f"{self.asked}: {self.error}"
            if self.error
            else f"{self.asked}: no answer within {self.took:.1f} s"
        )


def ask(
    names: Iterable[str] = (), addresses: Iterable[str] = (), *, timeout: float
) -> dict[str, Answer]:
    """Look up all of these at once; the answers by what was asked. Names and addresses must not
    overlap. Never raises for a bad name.

    Returns when all have answered, or after `timeout` seconds: then those that are missing are
    `silent`. Nothing is left running.
    """
    clock = Clock()
    wanted = {**dict.fromkeys(names, "name"), **dict.fromkeys(addresses, "address")}
    found: dict[str, Answer] = {}

    def answers(said: str = "") -> dict[str, Answer]:
        took = clock.elapsed()
        return {asked: found.get(asked) or Answer(asked, (), said, took) for asked in wanted}

    if not wanted or timeout <= 0:
        return answers()
    try:
        process = _start(json.dumps([(kind, asked) for asked, kind in wanted.items()]))
    except OSError as error:  # no process, no descriptor: that is this machine's answer, too
        return answers(f"the resolver could not be asked: {error.strerror or error}")
    assert process.stdin is not None
    assert process.stdout is not None
    pipe, rest, poll = process.stdout.fileno(), b"", select.poll()
    poll.register(pipe, select.POLLIN)
    try:
        while len(found) < len(wanted) and (left := timeout - clock.elapsed()) > 0:
            if not poll.poll(left * 1000.0):
                continue
            data = os.read(pipe, _READ_BYTES)
            if not data:
                return answers(
                    f"the interpreter that asks the resolver ended early (exit status {process.wait()})"
                )
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                asked, values, said = json.loads(line)
                found[asked] = Answer(asked, tuple(values), said, clock.elapsed())
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()
        # it was killed: this takes no time, unless the kernel cannot end it, and then nobody could
        process.wait()
    return answers()


def _start(questions: str) -> subprocess.Popen[bytes]:
    """Start a bare interpreter in a session of its own: Ctrl-C at a terminal is for whoever asked.
    It ends when its stdin does."""
    command = [sys.executable or "python3", "-I", "-S", "-c", _PROGRAM, questions]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        close_fds=True,
    )

"""Exchange by PMI-1: lines of text over a socket that hydra, the launcher of MPICH and of Intel MPI,
gives to each task.
"""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Mapping

from rallypoint.clusters.mpi import not_all_came, not_answered

ONCE = "a task has it once: an earlier program of this task may have used it"
"""Reason for which the socket is closed on the launcher's side, as a rule."""

ANSWER_TIMEOUT = 10.0
"""Seconds for an answer of the launcher's process on this host: one takes a millisecond."""

MORE, LAST = "+", "."
"""First characters of a value: others follow, or none does."""


def share(environ: Mapping[str, str], text: str, timeout: float) -> str:
    """Return, on every node, the text that node 0 has given; the others give "".

    All tasks must come within `timeout` seconds. Raises EnvironmentProblem `join-timeout` when one
    does not, UsageError `cluster-unclear` when the launcher does not answer. PMI_FD is closed after
    that: the ranks are no tasks of the launcher's. After an error it stays open, because hydra
    kills a process that closes it in the middle, and the error is still to be told.
    """
    fd = int(environ["PMI_FD"])
    try:
        talk = socket.socket(fileno=os.dup(fd))
    except OSError as error:
        raise not_answered(f"PMI_FD={fd} is no open socket", str(error)) from None
    with talk, talk.makefile("rb") as lines:

        def ask(line: str, reply: str, patience: float = ANSWER_TIMEOUT) -> dict[str, str]:
            step = f"the PMI of the launcher did not answer {line.split()[0]!r}"
            talk.settimeout(patience)
            try:
                talk.sendall(f"cmd={line}\n".encode())
                answer = lines.readline().decode("utf-8", "replace")
                if not answer:
                    raise BrokenPipeError("it has closed the connection")
            except TimeoutError:
                if line == "barrier_in":
                    raise not_all_came(patience) from None
                raise not_answered(step, f"within {patience:g} s") from None
            except OSError as error:
                once = [ONCE] if reply == "response_to_init" else []
                raise not_answered(step, str(error), *once) from None
            found = dict(part.partition("=")[::2] for part in answer.split())
            if found.get("cmd") != reply or found.get("rc", "0") != "0":
                raise not_answered(step, answer.strip())
            return found

        ask("init pmi_version=1 pmi_subversion=1", "response_to_init")
        size = int(ask("get_maxes", "maxes")["vallen_max"]) - 2  # its end, and our first character
        name = ask("get_my_kvsname", "my_kvsname")["kvsname"]
        if text:
            value = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
            pieces = [value[at : at + size] for at in range(0, len(value), size)]
            for number, piece in enumerate(pieces):
                mark = LAST if number == len(pieces) - 1 else MORE
                put = f"put kvsname={name} key=rallypoint{number} value={mark}{piece}"
                ask(put, "put_result")
        ask("barrier_in", "barrier_out", timeout)
        got = [MORE]
        while got[-1].startswith(MORE):
            key = f"rallypoint{len(got) - 1}"
            got.append(ask(f"get kvsname={name} key={key}", "get_result")["value"])
        ask("finalize", "finalize_ack")
    os.close(fd)
    return base64.urlsafe_b64decode("".join(piece[1:] for piece in got) + "==").decode()

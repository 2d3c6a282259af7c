"""Words of a shell, of a tool that runs another, or of the loader about a program."""

from __future__ import annotations

import errno
import re

from rallypoint.diagnosis.error_patterns.known_line import NAMES, line
from rallypoint.diagnosis.log_events import Sign
from rallypoint.diagnosis.pattern import Pattern

# Commands that start a job. When a shell does not find another command, its script goes on.
LAUNCHER_COMMAND = (
    r"(?:[^\s:']{0,300}/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|horovodrun|mpirun|mpiexec"
    r"|srun|rallypoint)"
)

_SCRIPT = rf"(?:{LAUNCHER_COMMAND}|[^\s:']{{1,300}}\.(?:sh|bash|py))"

# "bash: ", "job.sh: line 3: ", "sh: 1: "; nothing before a pasted line
_SHELLS = (
    r"^(?:[\w.-]{1,100}: (?=bash: ))?(?:-?(?:\S{0,300}/)?[bdkz]?a?sh: |\S{1,300}: (?=(?:exec: )?(?:line )?\d+: ))?"
    r"(?:exec: )?(?:(?:line )?\d+: )?(?:exec: )?"
)

_WHY = r"(?P<why>[Nn]o such file or directory|[Pp]ermission denied)"

_NOT_RUN = (
    (
        " not found",
        rf"{_SHELLS}(?P<program>{LAUNCHER_COMMAND}): (?:command )?not found(?:\.\.\.)?$",
    ),
    ("zsh:", rf"^zsh:(?:\d+:)? (?:command not found|{_WHY}): (?P<program>{_SCRIPT})$"),
    ("Permission denied", rf"{_SHELLS}(?P<program>(?!/etc/){_SCRIPT}): {_WHY}$"),
    # other files may be read by the script (`source`), which then goes on
    (" such file", rf"{_SHELLS}(?P<program>{LAUNCHER_COMMAND}|\./[^\s:']{{1,300}}): {_WHY}$"),
    (" required file", rf"{_SHELLS}(?P<program>[^\s:]{{1,300}}): cannot execute: required file "),
    (
        " bad interpreter",
        rf"{_SHELLS}(?P<program>[^\s:]{{1,300}}): (?:[^:]{{1,300}}: )?bad interpreter: (?:[^:]{{1,300}}: )?{_WHY}",
    ),
    (" binary file", rf"{_SHELLS}(?P<program>{_SCRIPT}): cannot execute binary file(?:: |$)"),
    (
        " shared libraries: ",
        r"^(?:\S{1,300}: )?(?P<program>[^\s:]{1,300}): error while loading shared libraries: ",
    ),
    (
        "': ",
        r"^(?:\S{0,100}/)?(?:env|nohup|timeout|nice|setsid|stdbuf): (?:failed to run command )?"
        rf"'(?P<program>[^\s']{{1,300}})': {_WHY}$",
    ),
)
"""Substring and pattern of each message of a shell, of a tool like `env`, or of the loader, about a
program that did not start.
"""

_ENDED = rf"(?P<name>{NAMES}|Abort(?= trap: ))(?: trap)?(?:: (?:9|15|1[01]|[468]))?"

LINES = (
    *(line(word, words, Sign.NOT_STARTED) for word, words in _NOT_RUN),
    # A script's shell names the process; one that a person types in pads the name to 24 columns
    # before the command, or has it alone. macOS has the number of the signal behind it.
    line(
        " ",
        rf"^\s{{0,8}}\S+[:\uff1a] ?(?:line|第|行) \d+(?: 行)?[:\uff1a] *(?P<pid>\d+) {_ENDED}(?: ?[(\uff08][^)\uff09]{{3,30}}[)\uff09])?(?: +\S.*)?$",
        by="the shell",
    ),
    line(
        "",
        rf"^[*`]*(?:\[\d+\][+-]? {{1,3}})?{_ENDED}(?: ?[(\uff08](?:core dumped|核心已转储)[)\uff09]| *(?:(?<=^.{{24}})|(?<=^\[.{{29}}))\S.*)?[*`]*$",
        by="the shell",
    ),
    # zsh and fish; jobs in the background may be others than this one
    line(
        "",
        r"^(?:zsh: |\[\d+\] +[+-]? +\d+ |fish: .{1,400} terminated by signal )"
        r"(?P<name>killed|segmentation fault|bus error|abort|illegal hardware instruction|floating point exception"
        r"|trace trap|terminated|SIG\w+)(?: \([\w ]+\))?(?: {2,}\S.*)?$"
        r"|^\[\d+\] *[+-]? +(?:\d+ exit|Exit) (?P<code>[1-9]\d{0,2}) {2,}\S.*$",
        by="the shell",
    ),
)


def by_shell(text: str) -> bool:
    """Tell whether a shell, or a tool that runs another, says that a program did not start."""
    return any(word in text and re.search(words, text) for word, words in _NOT_RUN)


def starts_ranks(text: str) -> bool:
    """Tell whether the program that a shell does not find is one that starts ranks, or Python."""
    return re.fullmatch(LAUNCHER_COMMAND, not_started(text)[0]) is not None


_MISSING = Pattern(
    r"can't open file '(?P<python>.{1,400})': (?P<errno>\[Errno 2\])"
    r"|python[\d.]*: (?:No module named |Error while finding module specification for ')(?P<module>[^\s']+)|exec: \"(?P<container>.{1,400}?)\": "
    r"|execvp error on file (?P<mpi>.{1,400}) \((?P<why>No such file or directory|Permission denied)\)"
    r"|(?:execve\(\)|start failed): (?P<slurm>.{1,400}): (?P<reason>No such file or directory|Permission denied"
    r"|Exec format error)"
)


def not_started(text: str) -> tuple[str, int]:
    """Read the program that could not be started, and the errno."""
    found = next((one for _, words in _NOT_RUN if (one := re.search(words, text))), None)
    if found is not None:
        why = found.groupdict().get("why") or ""
        if "shared libraries" in text:
            return found["program"], errno.ELIBACC
        if "binary file" in text:
            return found["program"], errno.ENOEXEC
        return found["program"], errno.EACCES if "ermission" in why else errno.ENOENT
    found = _MISSING.search(text)
    if found is None:
        return "the program", errno.ENOENT
    why = found["why"] or found["reason"]
    number = {"Permission denied": errno.EACCES, "Exec format error": errno.ENOEXEC}
    program = next(filter(None, found.group("python", "module", "container", "mpi", "slurm")))
    return program, number.get(why, errno.ENOENT)

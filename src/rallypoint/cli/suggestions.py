"""What was meant by a line that is refused, as a line to type."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence

from rallypoint.cli import foreign
from rallypoint.cli.command_line import CommandLine, Given
from rallypoint.cli.commands import BY_NAME, RUN, Command
from rallypoint.cli.options import BY_KEY, Option
from rallypoint.cli.spelling import nearest
from rallypoint.cli.values import near_check
from rallypoint.errors import UsageError


def incomplete(spelling: str, whole: str, command: Command) -> UsageError:
    """An option without its value, or a flag with one. `whole`: one of its names, when it was abbreviated."""
    option = next(option for option in command.options if whole in option.spellings)
    if option.metavar:
        return UsageError("usage", f"{spelling} lacks its value, {option.metavar}", help=example(option, command))
    return UsageError("usage", f"{spelling} is a flag and takes no value", help=(("give it alone", spelling),))


def swallowed(typed: Mapping[str, tuple[Given, ...]], argv: Sequence[str]) -> UsageError | None:
    """`-n train.py`: an option without its value has taken the program for it."""
    for key, given in typed.items():
        option, last = BY_KEY[key], given[-1]
        if not (option.metavar and option.example and last.text.endswith(".py") and last.text in argv):
            continue
        try:
            option.read(last.text)
        except ValueError:
            at = list(argv).index(last.text)
            return UsageError(
                "usage",
                f"{last.spelling} lacks its value, {option.metavar}: {last.text} stands in its place",
                help=(("give, for example", retyped((*argv[:at], option.example.rpartition(" ")[2]), *argv[at:])),),
            )
    return None


def unknown(word: str, argv: Sequence[str], command: Command) -> UsageError:
    """Name the nearest option, or why there is none, and show the command as it must be."""
    name, _, _ = word.partition("=")
    stranger = foreign.DIFFERENT.get(foreign.hyphened(name)) if command is RUN else None
    if stranger is not None:
        help = [(stranger.help, mended(argv, command))]
        return UsageError("option-unknown", f"rallypoint run has no option {name}: {stranger.headline}", help=tuple(help))
    opposite = _opposite(name, command.options)
    if opposite:
        at = argv.index(word)
        helps = [("leave it out", f"rallypoint {command.name} {shlex.join((*argv[:at], *argv[at + 1 :]))}".rstrip())]
        if command is RUN:
            helps.append(_as_the_programs(word, argv))
        headline = f"rallypoint {command.name} has no option {name}: {opposite} is off unless it is given"
        return UsageError("option-unknown", headline, help=tuple(helps))
    near = foreign.WHOLE.get(word) or _nearest_option(name, command.options)
    helps = []
    if near:
        helps.append((f"use {near}", mended(argv, command)))
    habit = foreign.SAME.get(foreign.hyphened(name), "") == near != ""
    if command is RUN and not (foreign.is_one_dashed(word) or habit or word in foreign.WHOLE):
        helps.append(_as_the_programs(word, argv))
    helps = helps or [("see the options", f"rallypoint {command.name} --help")]
    named = f"; the nearest is {near}" if near else ""
    return UsageError("option-unknown", f"rallypoint {command.name} has no option {name}{named}", help=tuple(helps))


def mended(argv: Sequence[str], command: Command = RUN) -> str:
    """The command without the options that it lacks, each in the words that it has for it; those that it has none for stay."""
    argv, in_front, at = list(argv), "", 0
    own: list[int] = []  # where the command's own words stand
    while at < len(argv):
        word = argv[at]
        name, equals, value = word.partition("=")
        option = next((option for option in command.options if name in option.spellings), None)
        if word == "--":
            break
        if not word.startswith("-"):
            if command.words == "own":
                own.append(at)
                at += 1
                continue
            if command is not RUN or not foreign.is_python(word) or argv[at + 1 :] == [] or {*argv[:at]} & {*BY_KEY["no_python"].spellings}:
                break  # here the program begins: what follows is its own
            del argv[at]
            continue
        if option is not None:
            at += 2 if option.metavar and not equals else 1
        elif command is RUN and foreign.is_mpi_count(word):
            argv = foreign.counted(argv, at)
        elif command is RUN and (stranger := foreign.DIFFERENT.get(foreign.hyphened(name))) is not None:
            in_front += foreign.in_front(argv, at, stranger)
            argv = foreign.without(argv, at, stranger)
        elif word in foreign.WHOLE:
            argv[at] = foreign.WHOLE[word]
        elif near := _nearest_option(name, command.options):
            argv[at : at + 1] = [f"{near}={value}"] if equals else [near, *_missing_value(near, argv[at + 1 :], command)]
        else:
            at += 1
    if any(option.alone and {*option.spellings} & {*argv[:at]} for option in command.options):
        argv = [word for i, word in enumerate(argv) if i not in own]
    return f"{in_front}rallypoint {command.name} {shlex.join(argv)}"


def retyped(typed: Sequence[str], *words: str, as_script: bool = False) -> str:
    """The command again, with these words behind its options. `as_script`: without the options that make the program something else."""
    others = {spelling for key in ("module", "no_python", "run_path") for spelling in BY_KEY[key].spellings} if as_script else set()
    return "rallypoint run " + shlex.join([*(word for word in typed if word not in others), *words])


def _as_the_programs(word: str, argv: Sequence[str]) -> tuple[str, str]:
    """The help for an option that may be the program's own."""
    return "put the program's own options after its name", _behind_the_program(word, argv)


def _behind_the_program(word: str, argv: Sequence[str]) -> str:
    """The command with an option, and its value if it has one, behind the program, where that can be made out."""
    at = argv.index(word) if word in argv else len(argv)
    after = range(at + 1, len(argv))
    program = next((i for i in after if argv[i].endswith((".py", ".pyc")) or argv[i - 1] in BY_KEY["module"].spellings), None)
    if program is None:
        return f"rallypoint run train.py {word}"
    end = at + 1 + (at + 1 < program and "=" not in word and not argv[at + 1].startswith("-"))
    return "rallypoint run " + shlex.join([*argv[:at], *argv[end:], *argv[at:end]])


def no_word(word: str, argv: Sequence[str], command: Command) -> UsageError | None:
    """What is wrong with a word that was meant as an option: it has come as such from a document, or from quotes."""
    if foreign.with_hyphens(word):
        again = mended([foreign.with_hyphens(one) or one for one in argv], command)
        return UsageError(
            "option-unknown",
            f"{word} begins with a dash (U+{ord(word[0]):04X}) that is no hyphen: text programs change options like that",
            help=(("type it with hyphens", again),),
        )
    name, *values = word.split()[:2] or [""]
    if values and any(name in option.spellings for option in command.options):
        at = argv.index(word)
        return UsageError(
            "usage",
            f"{word} is one word with a blank in it, and no option",
            help=(("give each word of it by itself", mended([*argv[:at], *word.split(), *argv[at + 1 :]], command)),),
        )
    return None


def _opposite(name: str, table: tuple[Option, ...]) -> str:
    """The flag that `--no-flag` is meant to put off; "" when there is none."""
    positive = foreign.hyphened(name).replace("--no-", "--", 1)
    flags = [flag for option in table if not option.metavar for flag in option.names]
    return positive if positive != foreign.hyphened(name) and positive in flags else ""


def _missing_value(name: str, rest: Sequence[str], command: Command) -> list[str]:
    """The example's value, for an option that takes one and that nothing, the next option or the program follows."""
    option = next((option for option in command.options if name in option.names), None)
    if option is None or not option.metavar or not option.example or (rest and not rest[0].startswith("-") and rest[0][-3:] != ".py"):
        return []
    return [option.example.rpartition(" ")[2]]


def _nearest_option(name: str, table: tuple[Option, ...]) -> str:
    hyphened = foreign.hyphened(name)
    names = [n for option in table for n in option.names if n.startswith("--")]
    if foreign.is_mpi_count(hyphened) and "--nproc-per-node" in names:
        return "-n"
    if foreign.SAME.get(hyphened) in names:
        return foreign.SAME[hyphened]
    hyphened = f"--{hyphened.lstrip('-')}"
    if len(hyphened) > 3:  # an abbreviation, which torchrun takes: `--nproc`
        started = [n for n in names if n.startswith(hyphened)]
        if started:
            return min(started, key=len)
    near = nearest(hyphened.lstrip("-"), [n[2:] for n in names])  # without the dashes, which are alike in all
    return f"--{near}" if near else ""


def example(option: Option, command: Command) -> tuple[tuple[str, str], ...]:
    """The help for a value that is missing or wrong."""
    return (("give, for example", option.example),) if option.example else (("see the options", f"rallypoint {command.name} --help"),)


def _as_options(line: CommandLine, command: Command) -> tuple[str, str]:
    """Words that somebody gave to a command that takes none, as the options that were meant, where that can be made out."""
    first, *rest = line.words
    meant: list[str] = []
    if any(f"--{first}" in option.spellings for option in command.options):
        meant = [f"--{first}", *rest]
    elif command.name == "serve" and not rest and not line.given:
        if place := re.fullmatch(r"(?:([\w.-]*):)?(\d{1,5})", first):
            meant = [*(["--host", place[1]] if place[1] else []), "--port", place[2]]
        elif re.fullmatch(r"\d+(\.\d+){3}|localhost", first):
            meant = ["--host", first]
    elif command.name == "doctor":
        checks = [near_check(word) for word in line.words]
        if all(checks):
            asked = [word for given in line.given.get("only", ()) for word in given.text.split(",")] if {*line.given} == {"only"} else []
            others = () if asked else line.typed
            names = ",".join(dict.fromkeys((*asked, *checks)))
            return "name the checks after --only", f"rallypoint doctor {shlex.join((*others, '--only', names))}"
    if meant:
        return "it is an option", f"rallypoint {command.name} {shlex.join((*line.typed, *meant))}"
    return "see the options", f"rallypoint {command.name} --help"


def no_words(line: CommandLine, command: Command) -> UsageError:
    """Words that somebody gave to a command that takes options only."""
    return UsageError("usage", f"rallypoint {command.name} takes options only, and got {line.words[0]}", help=(_as_options(line, command),))


def no_command(words: Sequence[str], commands: Collection[str]) -> UsageError:
    """The first word is no command."""
    name = words[0]
    if name == "-v" or (name.startswith("--") and nearest(name[2:], ("version", "help"))):
        near = "--version" if name == "-v" else f"--{nearest(name[2:], ('version', 'help'))}"
        return UsageError(
            "option-unknown", f"rallypoint has no option {name}; the nearest is {near}", help=((f"use {near}", f"rallypoint {near}"),)
        )
    if (name.startswith("-") and len(words) > 1) or name.endswith(".py") or os.sep in name:
        return UsageError(
            "usage", f"rallypoint {name}: no command is given", help=(("say what to do with it", f"rallypoint run {shlex.join(words)}"),)
        )
    if name in ("help", "version"):
        rest = words[1:2] if words[1:2] and words[1] in commands else []
        return UsageError(
            "usage", f"rallypoint has no command {name}", help=(("it is an option", f"rallypoint {shlex.join([*rest, f'--{name}'])}"),)
        )
    near, again = _near_command(words, commands)
    if near:
        live = (("or, for a job that is running", "rallypoint stacks"),) if name in foreign.LIVE else ()
        return UsageError("usage", f"rallypoint has no command {name}; the nearest is {near}", help=((f"use {near}", again), *live))
    return UsageError("usage", f"rallypoint has no command {name or repr(name)}", help=(("see the commands", "rallypoint --help"),))


def _near_command(words: Sequence[str], commands: Collection[str]) -> tuple[str, str]:
    """The command that was meant, and the line with it; "" when none was."""
    import difflib

    from rallypoint.diagnosis.causes import CATALOGUE

    name, rest = words[0], list(words[1:])
    if name in CATALOGUE or name.endswith((".log", ".out", ".err")):
        return "explain", f"rallypoint explain {shlex.join(words)}"
    if name in foreign.LAUNCHERS:
        return "run", mended(foreign.after_launcher(words))
    if foreign.is_python(name):
        if len(rest) > 1 and rest[0] == "-m" and rest[1] in foreign.LAUNCHERS:
            rest = foreign.after_launcher(rest[1:])
        return "run", mended(rest)
    near = foreign.COMMANDS.get(name) or next(iter(difflib.get_close_matches(name.lower(), commands, n=1)), "")
    if not near:
        return "", ""
    first, *more = near.split()
    more = [word for word in more if word not in map(foreign.SAME.get, rest)]
    return near, mended([*more, *rest], BY_NAME[first]).rstrip()

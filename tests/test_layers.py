"""The architecture, as a test: imports only go down, torch comes late, pure modules are pure."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import rallypoint

from .test_house import nodes_of, tree_of

ROOT = Path(__file__).parent.parent
SRC = Path(rallypoint.__file__).parent
MODULES = sorted(SRC.rglob("*.py"))

# A row imports from any row below it, and nothing beside it. This list is the architecture.
LAYERS = (
    {"__main__"},
    {"cli"},
    {"launcher"},
    {"diagnosis"},
    {"primitives", "record", "clusters"},
    {"store"},
    {"host"},
    {"wire", "world"},
    {"clock", "errors", "units"},
)
HEIGHT = {name: -row for row, names in enumerate(LAYERS) for name in names}

# The same inside cli/, file by file.
COMMAND_LINE = (
    {"main"},
    {"stop"},
    {"run", "show", "serve", "explain", "stacks", "doctor"},
    {"precheck", "progress", "port_file", "run_options"},
    {"args"},
    {"help", "hints"},
    {"commands"},
    {"options"},
    {"option_values"},
    {"error_exit"},
    {"output"},
)

# Where torch may be imported, and there only inside functions.
TORCH = (
    "wire/values.py",
    "primitives/",
    "store/c10d.py",
    "host/devices.py",
    "diagnosis/doctor/",
    "launcher/",
)

PURE = (
    "world.py", "wire/", "store/state/", "store/client/backoff.py", "record/timeline.py",
    "diagnosis/classify.py", "diagnosis/root_cause.py", "diagnosis/rank_kinds.py", "diagnosis/consequences.py",
    "diagnosis/log_consequences.py", "diagnosis/confidence.py",
     "diagnosis/tracebacks.py",
    "diagnosis/init_method.py", "diagnosis/rendezvous_mismatch.py", "diagnosis/render.py",
    "diagnosis/rank_snapshot.py", "diagnosis/hang_detector.py", "launcher/program.py", "launcher/sizes.py", "launcher/plan.py", "launcher/dry_run.py",
    "launcher/agent/supervisor.py", "launcher/exits.py", "launcher/restarts.py",
    "launcher/nodes/messages.py", "launcher/nodes/joining.py", "launcher/nodes/refusals.py",
    "launcher/nodes/all_ranks.py", "launcher/nodes/all_standings.py", "launcher/nodes/lead.py",
    "clusters/cluster.py", "clusters/slurm.py", "clusters/kubernetes.py",
)  # fmt: skip
IMPURE = {
    "asyncio",
    "random",
    "select",
    "selectors",
    "socket",
    "subprocess",
    "threading",
    "time",
    "multiprocessing",
    "psutil",
}

# Who reads a clock. Beside clock.py only what waits for the kernel until a deadline, or measures
# how long something took, in a process that has no clock of the agent's; and gloo.py, which sleeps.
CLOCKS = (
    "clock.py",
    "host/processes.py",
    "launcher/exception_capture.py",
    "launcher/worker/gloo.py",
    "launcher/worker/import_times.py",
    "launcher/template/template.py",
)

FORBIDDEN_NAMES = {
    "base",
    "common",
    "core",
    "helper",
    "helpers",
    "misc",
    "shared",
    "tools",
    "util",
    "utils",
}


VARIABLES = re.findall(
    r"^\| `([A-Z_]+\*?)` \|",
    (ROOT / "docs" / "reference" / "environment.md").read_text(),
    re.MULTILINE,
)
"""Environment variables that the reference page lists; a name that ends with `*` stands for a
family.
"""


def is_documented(variable: str) -> bool:
    """Tell whether the page of environment variables has a row for this one."""
    return any(
        variable == name or (name.endswith("*") and variable.startswith(name[:-1]))
        for name in VARIABLES
    )


def name_of(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, what is imported by full name, whether it is inside a function, or for types only),
    `import a` and `from a import b` alike.
    """
    return iter(_imports(path))


@cache
def _imports(path: Path) -> tuple[tuple[int, str, bool], ...]:
    return tuple(_find_imports(path))


def _find_imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    nodes = nodes_of(path)
    inside = {
        id(node)
        for block in nodes
        if isinstance(block, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        or (
            isinstance(block, ast.If)
            and isinstance(block.test, ast.Name)
            and block.test.id == "TYPE_CHECKING"
        )
        for node in ast.walk(block)
    }
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{path}:{node.lineno}: imports are written in full: from rallypoint.host import ports"
            )
            yield from (
                (node.lineno, f"{node.module}.{alias.name}", id(node) in inside)
                for alias in node.names
            )


def test_imports_only_go_down() -> None:
    wrong = []
    for path in MODULES:
        here = path.relative_to(SRC).with_suffix("").parts[0]
        if here in {"__init__", "testing"}:
            continue
        assert here in HEIGHT, f"{path}:1: {here} is in no layer"
        for line, target, _ in imports(path):
            root, _, rest = target.partition(".")
            there = rest.partition(".")[0]
            if root != "rallypoint" or there in {"__version__", here}:
                continue
            if there not in HEIGHT or HEIGHT[there] >= HEIGHT[here]:
                wrong.append(f"{path}:{line}: {here} imports {target}")
    assert not wrong, "\n".join(wrong)


# Packages of one package that may not import each other: the first names the second nowhere.
APART = (
    ("store/state", "store/client"),
    ("store/state", "store/server"),
    ("store/client", "store/server"),
    ("store/server", "store/client"),
    ("launcher/worker", "launcher/agent"),
    ("launcher/template", "launcher/agent"),
    ("launcher/worker", "launcher/launch"),
    ("launcher/template", "launcher/launch"),
    ("launcher/agent", "launcher/launch"),
    ("launcher/agent", "launcher/template"),
    ("launcher/agent", "launcher/worker"),
    ("launcher/worker", "launcher/template"),
    ("launcher/nodes", "launcher/agent"),
    ("launcher/nodes", "launcher/launch"),
    ("launcher/worker", "launcher/nodes"),
    ("launcher/template", "launcher/nodes"),
)
# What runs in a caller of `launch` and in its ranks.
ON_BOTH_SIDES = ("rallypoint.launcher.launch.marshalling.",)


@pytest.mark.parametrize(("here", "there"), APART)
def test_what_runs_in_different_processes_is_apart(here: str, there: str) -> None:
    files = [path for path in MODULES if name_of(path).startswith(here + "/")]
    assert files
    forbidden = "rallypoint." + there.replace("/", ".")
    wrong = [
        f"{path}:{line}: {target}"
        for path in files
        for line, target, _ in imports(path)
        if f"{target}.".startswith(f"{forbidden}.")
    ]
    wrong = [one for one in wrong if not one.rpartition(" ")[2].startswith(ON_BOTH_SIDES)]
    assert not wrong, "\n".join(wrong)


def test_imports_only_go_down_in_the_command_line_too() -> None:
    height = {name: -row for row, names in enumerate(COMMAND_LINE) for name in names}
    files = {
        path.stem: path
        for path in MODULES
        if path.parent == SRC / "cli" and path.stem != "__init__"
    }
    assert files.keys() == height.keys()
    wrong = [
        f"{path}:{line}: {here} imports {target}"
        for here, path in files.items()
        for line, target, _ in imports(path)
        if target.startswith("rallypoint.cli.") and height[target.split(".")[2]] >= height[here]
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_is_imported_late_and_only_where_it_may_be() -> None:
    wrong = [
        f"{path}:{line}: {'here' if late else 'at the top'}: {target}"
        for path in MODULES
        for line, target, late in imports(path)
        if target.partition(".")[0] == "torch" and not (late and name_of(path).startswith(TORCH))
    ]
    assert not wrong, "\n".join(wrong)


def test_pure_modules_touch_no_clock_socket_thread_or_process() -> None:
    wrong = [
        f"{path}:{line}: {target}"
        for path in MODULES
        if name_of(path).startswith(PURE)
        for line, target, _ in imports(path)
        if target.partition(".")[0] in IMPURE
        or (target.partition(".")[0] == "os" and not target.startswith("os.path"))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is_for() -> None:
    mute = [
        str(path)
        for path in MODULES
        if path.stat().st_size and not ast.get_docstring(tree_of(path))
    ]
    assert not mute


def test_no_module_is_named_after_nothing() -> None:
    assert not [str(path) for path in SRC.rglob("*") if path.stem.strip("_") in FORBIDDEN_NAMES]


def test_no_decision_reads_a_clock() -> None:
    wrong = [
        f"{path}:{line}"
        for path in MODULES
        if name_of(path) not in CLOCKS
        for line, target, _ in imports(path)
        if target.partition(".")[0] == "time"
    ]
    assert not wrong


def test_every_variable_of_ours_is_in_the_table() -> None:
    unknown = [
        f"{path}: {name}"
        for path in MODULES
        for name in sorted(set(re.findall(r"\bRALLYPOINT_[A-Z_]*[A-Z]\b", path.read_text("utf-8"))))
        if not is_documented(name)
    ]
    assert not unknown


def test_every_variable_that_is_read_or_set_by_name_is_in_the_table() -> None:
    unknown = [
        f"{path}:{line}: {name}"
        for path in MODULES
        for line, name in _names_of_variables(nodes_of(path))
        if not is_documented(name)
    ]
    assert not unknown, "\n".join(unknown)


def _names_of_variables(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """The literals in environ["X"], environ.get("X") and getenv("X"), whatever `environ` is an
    attribute of.
    """
    for node in nodes:
        if isinstance(node, ast.Subscript) and _is_environment(node.value):
            found = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            method = node.func
            if not (
                method.attr == "getenv"
                or (method.attr in {"get", "pop", "setdefault"} and _is_environment(method.value))
            ):
                continue
            found = node.args[0]
        else:
            continue
        if isinstance(found, ast.Constant) and isinstance(found.value, str):
            yield found.lineno, found.value


def _is_environment(node: ast.AST) -> bool:
    name = (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )
    return name in {"environ", "environment"}


def test_the_public_names_are_there_and_no_others() -> None:
    assert sorted(rallypoint.__all__) == rallypoint.__all__
    assert dir(rallypoint) == rallypoint.__all__
    for name in rallypoint.__all__:  # most are loaded when they are first asked for
        assert getattr(rallypoint, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rallypoint.nothing


def test_no_network_path_can_unpickle() -> None:
    """A client and a server that have exchanged values of every plain kind have not even loaded
    pickle; neither have torch's or numpy's names been looked up. Where the source names it, it is
    behind allow_pickle=True."""
    program = """
import sys
import rallypoint
with rallypoint.serve() as server, rallypoint.connect(server.address, secret=server.secret) as store:
    store["k"] = {"a": [1, 2.5, "x", b"y", None, 10**30, (True,), {1, 2}]}
    assert store["k"]["a"][5] == 10**30
    store.set_many({"x": bytes(200_000), "y": 1})
    assert len(store.get_many(["x", "y"])[0]) == 200_000
print(*sorted({"pickle", "_pickle", "cloudpickle", "marshal", "shelve", "torch", "numpy", "multiprocessing"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert set(done.stdout.split()) <= {"marshal"}  # the interpreter's own, for .pyc files
    named = [
        name_of(path)
        for path in MODULES
        if name_of(path).startswith(("wire/", "store/"))
        for _, target, _ in imports(path)
        if target.partition(".")[0] in {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
    ]
    assert set(named) == {"wire/values.py"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import rallypoint"],
        *(
            ["-m", "rallypoint", *words, "--help"]
            for words in ([], ["run"], ["explain"], ["serve"])
        ),
    ],
)
def test_import_and_help_load_neither_torch_nor_what_is_slow(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True
    )
    loaded = {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "rallypoint" in loaded
    assert not loaded & {"torch", "numpy", "rich", "psutil", "asyncio", "cloudpickle"}

"""Tables of `nodes`: samples of `bench/nodes.py` beside what they must be. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from bench import store
from bench.clusters import HOSTNAME
from bench.nodes import C10D, CASES, IMPORT, OURS, STATIC, TLS, WAIT
from bench.samples import Case
from bench.tables import Bound, Row, Table, seconds, times

KNOWN_FREE_GONE = {
    "rank-killed": (0.5, 1.0, 1.0),
    "agent-killed": (0.8, 1.5, 1.5),
    "node-killed": (0.8, 1.5, None),
    "lead-killed": (0.8, 1.5, None),
    "node-frozen": (3.0, 3.0, None),
    "link-down": (3.0, 3.0, 3.0),
    "dropped": (3.0, 3.0, 3.0),
    "sent-dropped": (3.0, 3.0, 3.0),
}
"""Seconds after a fault: the other nodes say so, are free, and the node's own ranks are gone."""

WORDS = {
    "rank-killed": "a rank of node 1 is SIGKILLed",
    "agent-killed": "the launcher of node 1 is SIGKILLed",
    "node-killed": "every process of node 1 is SIGKILLed",
    "lead-killed": "every process of node 0 is SIGKILLed",
    "node-frozen": "every process of node 1 is stopped (SIGSTOP)",
    "link-down": "the link of node 1 is down",
    "dropped": "packets to and from node 1 are dropped",
    "sent-dropped": "packets from node 1 are dropped",
}


def tables(cases: Mapping[str, Case]) -> list[Table]:
    """Every table, also those without a row."""
    return [_start(cases), _engines(cases), _faults(cases), _tls(cases)]


def _start(cases: Mapping[str, Case]) -> Table:
    rows = []
    for name, case in cases.items():
        nodes, of, ranks = name.removeprefix("nodes-").partition("x")
        if not name.startswith("nodes-") or not of:
            continue
        imports = case.ratio(OURS, IMPORT, "seconds")
        faster = case.ratio(C10D, OURS, "seconds")
        bounds = (
            Bound("<= 1.8 x one import per processor", imports, 1.8),
            Bound(">= 5 x faster than torchrun c10d", faster, 5, at_least=True),
        )
        cells = (
            f"{nodes} x {ranks}",
            *(seconds(case, who) for who in (OURS, IMPORT, C10D, STATIC)),
            times(imports),
            times(faster),
        )
        rows.append(Row(cells, bounds if name == "nodes-2x8" else (), case))
    return Table(
        "Several nodes: from the last command to first all_reduce",
        "Nodes are network namespaces of one machine, so all of them share its processors. Seconds from the start of the last node's "
        "command to the end of the last rank's first gloo all_reduce. In each turn everyone runs once, beside one interpreter per "
        "processor that does nothing but `import torch`; ratios are medians of the turns' ratios.",
        (
            "nodes x ranks",
            "rallypoint",
            "`import torch`",
            "torchrun c10d",
            "torchrun static",
            "rallypoint / import",
            "torchrun c10d / rallypoint",
        ),
        tuple(rows),
    )


ENGINE_NAMES = {
    "slurm": "Slurm, by srun",
    "slurm-script": "Slurm, in a script without srun",
    "openmpi5": "Open MPI 5",
    "openmpi4": "Open MPI 4",
    "mpich": "MPICH",
    "ray": "Ray",
}


def _engines(cases: Mapping[str, Case]) -> Table:
    rows = []
    for name, engine in ENGINE_NAMES.items():
        if case := cases.get(f"engine-{name}"):
            beyond = case.ratio(OURS, IMPORT, "beyond", "seconds")
            cells = (
                engine,
                *(seconds(case, who) for who in (OURS, HOSTNAME, IMPORT)),
                times(beyond),
            )
            rows.append(Row(cells, (Bound("<= 1.8 x one import", beyond, 1.8),), case))
    return Table(
        "Clusters: from the engine's command to first all_reduce",
        "Two nodes of two ranks. `hostname` is what the engine itself takes to run that on both nodes, for Ray an actor on each that "
        "tells it. The last column is what `rallypoint run` takes beyond it, in imports of torch; a median of the turns.",
        (
            "engine",
            "rallypoint",
            "`hostname`",
            "`import torch`",
            "(rallypoint - hostname) / import",
        ),
        tuple(rows),
    )


def _faults(cases: Mapping[str, Case]) -> Table:
    rows = []
    for name in CASES:
        case = cases.get(name)
        for who in case.who() if case else []:
            assert case is not None
            bounds = _bounds(name, case) if who == OURS else ()
            cells = [_cell(case, who, point) for point in ("known", "free", "gone")]
            rows.append(Row((WORDS[name], who, *cells), bounds, case))
    return Table(
        "Several nodes: something happens to one of them",
        "Four nodes of two ranks, all in a loop of all_reduce. Seconds from the fault until the slowest other node has printed its report, "
        "until no process of the job is left on any other node, and until none is left on the node itself (which a stopped one is for as "
        f"long as it is stopped). What had not happened after {WAIT:g} s was not waited for.",
        ("what", "launcher", "others know after", "others free after", "own ranks gone after"),
        tuple(rows),
    )


def _tls(cases: Mapping[str, Case]) -> Table:
    rows = []
    if case := cases.get("tls-joining-512"):
        ratio = case.ratio(TLS, store.TCP, "seconds")
        cells = (
            "512 clients join",
            *(seconds(case, who) for who in (TLS, store.TCP)),
            times(ratio),
        )
        rows.append(Row(cells, (Bound("<= 2 x without", ratio, 2),), case))
    if case := cases.get("tls-values"):
        for what, name in (("a value is written", "set"), ("a value is read", "get")):
            key = f"{name}_{store.BULK_BYTES}"
            rate = case.median(TLS, key)
            rates = (_gigabytes(rate), _gigabytes(case.median(store.TCP, key)))
            cells = (what, *rates, times(case.ratio(TLS, store.TCP, key)))
            bound = Bound(">= 0.4 GB/s", None if rate is None else rate / 1e9, 0.4, at_least=True)
            rows.append(Row(cells, (bound,), case))
    return Table(
        "Several nodes: what TLS costs",
        "A server in a process of its own, and clients in processes of theirs, over loopback. Joining is over when the last of 512 "
        "processes has connected and passed a barrier of all. A value has 64 MiB; both sides of its encryption run on this machine.",
        ("what", "with --tls", "without", "with / without"),
        tuple(rows),
    )


def _gigabytes(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:.2f} GB/s"


def _cell(case: Case, who: str, point: str) -> str:
    if case.numbers(who, point):
        return seconds(case, who, point)
    started = any(sample.values for sample in case.samples if sample.who == who)
    return f"not within {WAIT:g} s" if started else "did not start"


def _bounds(name: str, case: Case) -> tuple[Bound, ...]:
    words = ("known", "free", "gone")
    return tuple(
        Bound(f"{word} <= {limit:g} s", _slowest(case, word), limit)
        for word, limit in zip(words, KNOWN_FREE_GONE[name], strict=True)
        if limit is not None
    )


def _slowest(case: Case, word: str) -> float | None:
    """The median, None as soon as it did not happen in one turn."""
    numbers = case.numbers(OURS, word)
    turns = sum(sample.who == OURS for sample in case.samples)
    return case.median(OURS, word) if len(numbers) == turns else None

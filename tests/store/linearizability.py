"""Was there one order? Checks a history of concurrent operations on keys.

The search of Wing and Gong (1993) with Lowe's memory of configurations that were seen before
(2017), as porcupine does it for etcd. A history is split by key first, which is sound
(linearizability is local) and what makes it fast. It is exponential at worst: after `steps` steps
the verdict is "unknown", which is a reason to look, not a pass. Let every write have a value of its
own, so that a read says which write it saw.

Record an `Operation` per call: `start` before the request is sent, `end` after its reply was read,
on one clock. A call whose outcome is unknown (a deadline, a lost session) has `end=inf`: it may
have happened at any later time, or not at all. A call that did certainly not happen is left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

Kind = Literal["get", "set", "delete", "add", "cas"]

STEPS = 2_000_000
"""Some seconds."""


class Operation(NamedTuple):
    """One call on one key. None stands for "no value".

    | kind   | arguments       | result                                |
    |--------|-----------------|---------------------------------------|
    | get    |                 | the value                             |
    | set    | value           | None                                  |
    | delete |                 | whether there was one                 |
    | add    | amount          | the sum                               |
    | cas    | expected, value | whether it was written                |
    """

    client: Hashable
    kind: Kind
    key: str
    arguments: tuple[Any, ...]
    result: Any
    start: float
    end: float = math.inf


class Verdict(NamedTuple):
    """`blame`: the key, and the operation whose end the longest order that was found could not
    reach.
    """

    outcome: Literal["linearizable", "violated", "unknown"]
    key: str = ""
    blame: Operation | None = None
    steps: int = 0

    def __bool__(self) -> bool:
        return self.outcome == "linearizable"


def check(history: Iterable[Operation], *, steps: int = STEPS) -> Verdict:
    """Whether each key's operations could have happened one at a time, each between its start and
    its end, with these results.

    `steps` bounds the whole search. "violated" wins over "unknown".
    """
    by_key: dict[str, list[Operation]] = defaultdict(list)
    for operation in history:
        by_key[operation.key].append(operation)
    used = 0
    doubt: Verdict | None = None
    for operations in by_key.values():
        verdict = _search(operations, steps - used)
        used += verdict.steps
        if verdict.outcome == "violated":
            return verdict._replace(steps=used)
        if verdict.outcome == "unknown":
            doubt = verdict
    return Verdict("linearizable", steps=used) if doubt is None else doubt._replace(steps=used)


def _step(value: Any, operation: Operation) -> tuple[bool, Any]:
    """Whether the operation can have this result when the key has `value`, and what the key has
    then.
    """
    kind, arguments, result = operation.kind, operation.arguments, operation.result
    unknown = operation.end == math.inf
    if kind == "get":
        return unknown or result == value, value
    if kind == "set":
        return True, arguments[0]
    if kind == "delete":
        return unknown or result == (value is not None), None
    if kind == "add":
        total = (value or 0) + arguments[0]
        return unknown or result == total, total
    written = value == arguments[0]
    return unknown or result == written, arguments[1] if written else value


def _search(operations: Sequence[Operation], limit: int) -> Verdict:
    """One key. Events (calls and returns) are a doubly linked list; an operation that has its place
    in the order is lifted out.
    """
    events = [(operation.start, 0, number) for number, operation in enumerate(operations)]
    events += [
        (operation.end, 1, number)
        for number, operation in enumerate(operations)
        if operation.end != math.inf
    ]
    events.sort()
    # Event n is node n + 1; node 0 is the head, and the last one the end.
    end = len(events) + 1
    after = list(range(1, end + 1))
    before = [node - 1 for node in range(end + 1)]
    return_of = {number: node for node, (_, is_return, number) in enumerate(events, 1) if is_return}

    def lift(node: int) -> None:
        after[before[node]] = after[node]
        before[after[node]] = before[node]

    def put_back(node: int) -> None:
        after[before[node]] = before[after[node]] = node

    value: Any = None
    chosen = 0  # a bit for each operation that has its place
    left = len(return_of)
    path: list[tuple[int, Any]] = []
    seen: set[tuple[int, Hashable]] = set()
    furthest, blame = -1, None
    node = after[0]
    for taken in range(limit):
        if not left:
            return Verdict("linearizable", operations[0].key, steps=taken)
        _, is_return, number = events[node - 1]
        if not is_return:
            possible, then = _step(value, operations[number])
            if possible and (chosen | 1 << number, then) not in seen:
                seen.add((chosen | 1 << number, then))
                path.append((node, value))
                value, chosen = then, chosen | 1 << number
                lift(node)
                if number in return_of:
                    lift(return_of[number])
                    left -= 1
                node = after[0]
            else:
                node = after[node]
            continue
        # This operation has ended, and nothing that can come before it fits: go back.
        if len(path) > furthest:
            furthest, blame = len(path), operations[number]
        if not path:
            return Verdict("violated", operations[number].key, blame, taken)
        node, value = path.pop()
        _, _, number = events[node - 1]
        chosen &= ~(1 << number)
        if number in return_of:
            put_back(return_of[number])
            left += 1
        put_back(node)
        node = after[node]
    return Verdict("unknown", operations[0].key, blame, limit)

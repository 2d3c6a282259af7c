"""Values: what goes in comes out equal and of the same type, or is refused by its path; and bytes
are a value or malformed.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import datetime
import enum
import functools
import math
import pathlib
import random
import struct
import subprocess
import sys
import types
from collections import OrderedDict
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as some

from rallypoint.errors import ValueUnsupported
from rallypoint.wire import values
from rallypoint.wire.messages import INLINE_BYTES
from rallypoint.wire.values import ALIGNMENT, MAX_DEPTH, Parts, alloc, decode, encode, join, size_of

from ..search import tries

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
needs_numpy = pytest.mark.skipif(find_spec("numpy") is None, reason="numpy is not installed")


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def numpy() -> Any:
    return pytest.importorskip("numpy")


# --- any value, and whether two are the same ---

ints = some.integers() | some.sampled_from(
    [0, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 2**9000]
)
texts = (
    some.text(some.characters())
    | some.sampled_from(["", "\ud800", "\udcff.txt"])
    | some.integers(1, 70_000).map(lambda n: "é" * n)
)
scalars = (
    some.none()
    | some.booleans()
    | ints
    | some.floats()
    | texts
    | some.binary()
    | some.integers(4000, 70_000).map(lambda n: b"\xc1" * n)
)
hashables = some.recursive(
    scalars,
    lambda inner: some.tuples(inner, inner) | some.frozensets(inner, max_size=3),
    max_leaves=5,
)
keys = some.booleans() | ints | some.text(some.characters(), max_size=8)


def containers(inner: some.SearchStrategy[Any]) -> some.SearchStrategy[Any]:
    dicts = some.dictionaries(keys, inner, max_size=4)
    return (
        some.lists(inner, max_size=4)
        | some.lists(inner, max_size=4).map(tuple)
        | some.sets(hashables, max_size=4)
        | some.frozensets(hashables, max_size=4)
        | dicts
        | dicts.map(OrderedDict)
        | dicts.map(collections.Counter)
    )


anything = some.recursive(scalars, containers, max_leaves=12)


def same(one: Any, other: Any) -> bool:
    """Equal and of the same types all the way down, floats bit by bit, dicts in order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, (set, frozenset)):
        # NaN is in a set by identity, and True is 1: compare what can be told apart.
        return sorted(map(_form, one)) == sorted(map(_form, other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    return bool(one == other)


def _form(value: Any) -> str:
    if isinstance(value, float):
        return struct.pack("d", value).hex()
    if isinstance(value, int):
        return f"{type(value).__name__} {value:x}"
    if isinstance(value, (tuple, frozenset)):
        parts = [_form(each) for each in value]
        return f"{type(value).__name__}({' '.join(parts if isinstance(value, tuple) else sorted(parts))})"
    return repr(value)


def through(value: object, **options: Any) -> Any:
    """The value as somebody reads it from the store: from `bytes` when it is small, from memory of
    its own when it is large.
    """
    encoded = encode(value)
    return decode(encoded if isinstance(encoded, bytes) else bytearray(join(encoded)), **options)


def refused(value: object, **options: Any) -> str:
    with pytest.raises(ValueUnsupported) as caught:
        encode(value, **options)
    assert caught.value.code == "value-unsupported"
    return str(caught.value)


def malformed(data: bytes) -> str:
    with pytest.raises(ValueUnsupported) as caught:
        decode(data)
    assert caught.value.code == "value-malformed"
    return str(caught.value)


def laid_out(tree: object, buffers: bytes = b"") -> bytes:
    packed = msgspec.msgpack.encode(tree)
    head = struct.pack("<BBxxI", 0xC1, 1, len(packed)) + packed
    return head + (b"\0" * (-len(head) % ALIGNMENT) + buffers if buffers else b"")


# --- the closed set ---


@given(anything)
@example([[], (), set(), frozenset(), {}, OrderedDict()])
@example({True: 1, 0: False, "": None, -5: {2**70: [2**64, -(2**63) - 1]}})
@example({"\ud800": "\udfff", "x": "plain"})
@example([math.nan, -0.0, 0.0, math.inf, 1, True, 1.0])
@example({1.5, math.inf, None, "a", b"a", (1, frozenset({2}))})
@example([b"x" * 4096, b"y" * 4097, b"", b"z" * 100_000])
def test_what_goes_in_comes_out(value: Any) -> None:
    encoded = encode(value)
    assert isinstance(encoded, bytes if size_of(encoded) <= INLINE_BYTES else Parts)
    data = join(encoded)
    assert len(data) == size_of(encoded)
    for form in (data, bytearray(data), memoryview(data)):
        back = decode(form)
        assert same(back, value)
        assert join(encode(back)) == data  # so that compare_and_set finds what was read


@given(
    some.none()
    | some.booleans()
    | some.integers(-(2**63), 2**63 - 1)
    | some.floats()
    | some.text()
    | some.binary(max_size=70_000)
)
def test_a_scalar_is_the_bare_msgpack_scalar(value: Any) -> None:
    assert join(encode(value)) == msgspec.msgpack.encode(value)


@pytest.mark.parametrize("value", [2**63, [], {}, b"", -(2**63) - 1, "\ud800", ()])
def test_all_else_begins_with_the_mark(value: Any) -> None:
    assert (join(encode(value))[0] == 0xC1) == (value != b"")


def test_the_bytes_of_a_value() -> None:
    # A server keeps values longer than its clients live: change the version in the head before
    # changing this test.
    tree = msgspec.msgpack.encode([4, "a", "b", [0, 1, None], [8, 5000]])
    head = b"\xc1\x01\0\0" + struct.pack("<I", len(tree)) + tree
    assert (
        encode({"a": [1, None], "b": b"x" * 5000}) == head + b"\0" * (64 - len(head)) + b"x" * 5000
    )


@given(some.lists(hashables, max_size=8), some.randoms(use_true_random=False))
def test_equal_sets_have_equal_bytes(elements: list[Any], shuffle: random.Random) -> None:
    once = set(elements)
    again = sorted(once, key=repr)
    shuffle.shuffle(again)
    assert join(encode(once)) == join(encode(set(again)))


def test_what_is_not_the_same_has_other_bytes() -> None:
    different = [
        1,
        1.0,
        True,
        "1",
        b"1",
        0.0,
        -0.0,
        0,
        False,
        None,
        [1],
        (1,),
        {1},
        frozenset({1}),
        {1: 1},
        OrderedDict({1: 1}),
        {1: 1.0},
    ]
    different += [{1: 0, 2: 0}, {2: 0, 1: 0}, [[]], [()], 2**64, str(2**64)]
    assert len({join(encode(value)) for value in different}) == len(different)
    assert encode(math.nan) == encode(math.nan)


def test_a_large_value_is_not_copied() -> None:
    data = bytes(range(256)) * 1000
    alone = encode(data)
    assert isinstance(alone, Parts)
    assert alone.buffers[-1].obj is data
    inside = encode({"data": data, "more": [data]})
    assert isinstance(inside, Parts)
    assert [buffer.obj is data for buffer in inside.buffers] == [False, True, True]
    assert all(buffer.format == "B" and buffer.contiguous for buffer in inside.buffers)
    assert sum(map(len, inside.buffers)) == inside.size == size_of(inside)


def test_short_buffers_are_gathered(numpy: Any) -> None:
    encoded = encode([b"x" * 4097, *(numpy.full(5, n) for n in range(200)), b"y" * 90_000])
    assert isinstance(encoded, Parts)
    head, long, gathered, last = map(len, encoded.buffers)
    assert (long, last) == (4097, 90_000)
    assert head % ALIGNMENT == 0
    assert 200 * 40 <= gathered <= 201 * ALIGNMENT


def test_bytes_and_text_that_are_too_long_for_msgpack(monkeypatch: pytest.MonkeyPatch) -> None:
    # From 4 GiB on, which is too much for a test: so the limit is lowered, msgpack's own as well.
    pack = values._pack

    def limited(value: object) -> bytes:
        encoded = pack(value)
        if len(encoded) > INLINE_BYTES + 100:
            raise ValueError("Can't encode strings longer than 2**32 - 1")
        return encoded

    monkeypatch.setattr(values, "_pack", limited)
    monkeypatch.setattr(values, "_MSGPACK_BYTES", INLINE_BYTES + 50)
    for value in (
        "a" * INLINE_BYTES,
        "é" * INLINE_BYTES,
        b"x" * INLINE_BYTES * 2,
        {"é" * INLINE_BYTES: ["a" * INLINE_BYTES * 2, "short"]},
    ):
        encoded = join(encode(value))
        assert (encoded[0] == 0xC1) == (value != "a" * INLINE_BYTES)
        assert decode(bytearray(encoded)) == value


# --- what is refused ---


class Color(enum.IntEnum):
    RED = 1


class Point(collections.namedtuple("Point", "x y")):
    __slots__ = ()


class Text(str):
    __slots__ = ()


class Config:
    def __init__(self, **fields: object) -> None:
        self.__dict__ |= fields


HERE = __name__


@pytest.mark.parametrize(
    ("value", "headline"),
    [
        (print, "value: a builtin_function_or_method cannot be stored"),
        (
            {"cfg": {"lr_schedule": lambda step: 0.1}},
            'value["cfg"]["lr_schedule"]: a function cannot be stored',
        ),
        ([1, ({"a": object()},)], 'value[1][0]["a"]: an object cannot be stored'),
        (
            {"a": {3: {True: {1, 2, (4, Text("x"))}}}},
            f'value["a"][3][True]{{...}}[1]: a {HERE}.Text (a subclass of str) cannot be stored',
        ),
        (
            {'quo"te': {"new\nline": ...}},
            """value['quo"te']['new\\nline']: an ellipsis cannot be stored""",
        ),
        ({"k" * 200: ...}, f'value["{"k" * 55}...]: an ellipsis cannot be stored'),
        ({2**9000: ...}, f"value[{hex(2**9000)[:24]}...]: an ellipsis cannot be stored"),
        (Color.RED, f"value: a {HERE}.Color (a member of an Enum) cannot be stored"),
        (Point(1, 2), f"value: a {HERE}.Point (a subclass of tuple) cannot be stored"),
        (
            collections.defaultdict(list),
            "value: a collections.defaultdict (a subclass of dict) cannot be stored",
        ),
        (bytearray(b"x"), "value: a bytearray cannot be stored"),
        (
            {"cfg": argparse.Namespace(lr=0.1)},
            'value["cfg"]: an argparse.Namespace cannot be stored',
        ),
        (
            [{(1, 2): 3}],
            "value[0]: a dict with the key (1, 2) (tuple; int, str and bool are possible) cannot be stored",
        ),
        (
            {None: 1},
            "value: a dict with the key None (NoneType; int, str and bool are possible) cannot be stored",
        ),
        (
            {Color.RED: 1},
            f"value: a dict with the key <Color.RED: 1> ({HERE}.Color; int, str and bool are possible) cannot be stored",
        ),
    ],
    ids=lambda each: each[:40].replace("\\", "") if isinstance(each, str) else "",
)
def test_anything_else_is_refused_by_its_path(value: object, headline: str) -> None:
    assert refused(value) == headline


@pytest.mark.parametrize(
    ("value", "sentence", "command"),
    [
        ({"c": Color.RED}, "store its value", 'value["c"].value'),
        ([pathlib.Path("/tmp")], "store it as text", "str(value[0])"),
        ([datetime.datetime(2024, 1, 2)], "store it as text", "value[0].isoformat()"),
        ([datetime.date(2024, 1, 2)], "store it as text", "value[0].isoformat()"),
        ([datetime.timedelta(1)], "store its seconds", "value[0].total_seconds()"),
        ({"r": range(3)}, "make it a list", 'list(value["r"])'),
        ({"p": Point(1, 2)}, "store its fields", 'value["p"]._asdict()'),
        ([argparse.Namespace(lr=1)], "store its attributes", "vars(value[0])"),
        ({(1, 2): 3}, "make it a str", "str((1, 2))"),
        (memoryview(b""), "store a copy", "bytes(value)"),
    ],
)
def test_the_help_is_a_line_to_type(value: object, sentence: str, command: str) -> None:
    with pytest.raises(ValueUnsupported) as caught:
        encode(value)
    assert caught.value.help[0] == (sentence, command)
    assert caught.value.help[-1][1] == "rallypoint.connect(..., allow_pickle=True)"


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_absent_is_no_value(allow_pickle: bool) -> None:
    with pytest.raises(ValueUnsupported) as caught:
        encode({"a": [values.ABSENT]}, allow_pickle=allow_pickle)
    assert (
        str(caught.value) == 'value["a"][0]: ABSENT stands for "no such key" and cannot be stored'
    )
    assert [command for _, command in caught.value.help] == ["store.delete(key)"]


def test_an_ordered_dict_keeps_its_metadata_and_no_other_attribute() -> None:
    state: Any = OrderedDict(a=1)
    state._metadata = OrderedDict({"": {"version": 2}})
    back = through(state)
    assert same(back, state)
    assert same(back._metadata, state._metadata)
    assert not hasattr(through(OrderedDict(a=1)), "_metadata")
    state._metadata = {"layer": print}
    assert refused({"model": state}).startswith(
        'value["model"]._metadata["layer"]: a builtin_function'
    )
    del state._metadata
    state.lr_schedule = 1
    assert (
        refused(state) == "value: an OrderedDict with an attribute 'lr_schedule' cannot be stored"
    )


def nested(depth: int, kind: str) -> object:
    value: Any = 1
    for _ in range(depth):
        value = {"k": value} if kind == "dict" else getattr(builtins, kind)([value])
    return value


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "frozenset"])
def test_nesting_has_a_limit(kind: str) -> None:
    assert same(through(nested(MAX_DEPTH, kind)), nested(MAX_DEPTH, kind))
    headline = refused(nested(MAX_DEPTH + 1, kind))
    assert headline.endswith(f" {MAX_DEPTH} deep, or inside themselves, cannot be stored")
    assert len(headline) < 200


def test_a_container_inside_itself_is_named() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert refused(loop).startswith("value[0][0][0]")
    shared = [1]
    assert same(through([shared, shared]), [[1], [1]])  # twice is not inside


# --- bytes that are no value ---


@given(some.binary(max_size=300))
@example(b"")
@example(b"\xc1")
@example(b"\xc1\x01\0\0\xff\xff\xff\xff")
@example(b"\xc1\x02\0\0\0\0\0\0")
@example(b"\x81\x01\x02")
@example(b"\xd6\xff\0\0\0\0")
@example(b"\xa1\xff")
@example(b"\x91" * 100_000)
@example(b"\xc1\x01\0\0" + struct.pack("<I", 100_000) + b"\x91" * 100_000)
@example(b"\xc1\x01\0\0" + struct.pack("<I", 100_000) + b"\x92\x00" * 50_000)
def test_random_bytes_are_a_value_or_malformed(data: bytes) -> None:
    accepted_or_malformed(data)
    accepted_or_malformed(b"\xc1\x01\0\0" + struct.pack("<I", len(data)) + data)


def accepted_or_malformed(data: bytes) -> None:
    for form in (data, bytearray(data)):
        try:
            value = decode(form)
        except ValueUnsupported as error:
            if error.code != "value-malformed" and not any(
                word in str(error) for word in ("pickle", "imported")
            ):
                raise
        else:
            encode(value)  # what was accepted is a value


@functools.cache
def seeds() -> list[bytes]:
    """Encodings of every kind of node, to be spoiled."""
    found: list[Any] = [
        {"a": [1, None, 2.5], "b": (True, "text"), 3: b"x" * 5000},
        OrderedDict({"k": {1, 2, "x"}, "l": frozenset({(1, 2), 2**80})}),
        ["\ud800" * 20, -(2**70), b"", []],
    ]
    if find_spec("numpy"):
        import numpy

        found += [
            numpy.arange(6, dtype=">i2").reshape(2, 3),
            numpy.float64(2.5),
            numpy.zeros((0, 4)),
            numpy.zeros(2, "M8[25s]"),
        ]
        found += [
            {
                "s": numpy.array(["ab", "c"]),
                "n": numpy.str_("x"),
                "b": numpy.bytes_(b"y"),
            }
        ]
    if find_spec("torch"):
        import torch

        found += [
            torch.arange(6.0).reshape(2, 3),
            {
                "t": torch.ones(3, dtype=torch.bfloat16),
                "e": torch.empty(2, 0),
                "s": torch.tensor(1j),
            },
        ]
        found += [[torch.Size([2, 3]), torch.float16, torch.device("cuda", 1), torch.device("cpu")]]
    return [join(encode(value)) for value in found] + [join(encode(print, allow_pickle=True))]


@tries(400)
@given(some.data())
def test_spoiled_values_are_values_or_malformed(data: some.DataObject) -> None:
    encoded = bytearray(seeds()[data.draw(some.integers(0, len(seeds()) - 1))])
    for _ in range(data.draw(some.integers(1, 3))):
        at = data.draw(some.integers(0, min(len(encoded), 150)))
        encoded[at : at + data.draw(some.integers(0, 3))] = data.draw(some.binary(max_size=3))
    assume(len(encoded) < 10_000)
    accepted_or_malformed(bytes(encoded))
    accepted_or_malformed(bytes(encoded[: data.draw(some.integers(0, len(encoded)))]))


names = some.sampled_from(
    [
        "float32",
        "bool",
        "qint8",
        "int4",
        "Tensor",
        "<f4",
        "<f8",
        "|S0",
        "<U3",
        "<M8[s]",
        "|O",
        "<f16/63",
        "<f16",
        "|V8",
        "cpu",
    ]
)
numbers = some.integers(-3, 20) | some.sampled_from([2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
leaves = some.none() | some.booleans() | numbers | names | some.binary(max_size=17) | some.floats()
trees = some.recursive(
    leaves,
    lambda inner: some.tuples(some.integers(0, 18), some.lists(inner, max_size=5)).map(
        lambda n: [n[0], *n[1]]
    ),
)


@tries(500)
@given(trees, some.binary(max_size=200))
def test_trees_that_nobody_writes_are_values_or_malformed(tree: object, buffers: bytes) -> None:
    accepted_or_malformed(laid_out(tree, buffers))


@tries(300)
@given(some.from_regex(values._RAW_DTYPE, fullmatch=True))
def test_names_of_numpy_dtypes_are_dtypes_or_malformed(name: str) -> None:
    pytest.importorskip("numpy")
    accepted_or_malformed(laid_out([10, name, 0]))
    accepted_or_malformed(laid_out([11, name, b"x" * 8]))


@pytest.mark.parametrize(
    ("tree", "buffers", "text"),
    [
        ([9, "float32", 2**40], b"x" * 64, "a buffer of 4398046511104 bytes where 64 are left"),
        ([9, "float32", 2**62, 2**62], b"", "a buffer of "),
        ([9, "float32", 0, 2**62, 2**62], b"", "a shape [0, 4611686018427387904, 461"),
        ([9, "float32", *[1] * 65], b"x" * 4, "a shape [1, 1,"),
        ([9, "float32", -1, -4], b"x" * 16, "a shape [-1, -4]"),
        ([9, "float32", True], b"x" * 4, "a shape [True]"),
        ([9, "float32", 1.0], b"x" * 4, "a shape [1.0]"),
        ([9, "float32", 4], b"x" * 15, "a buffer of 16 bytes where 15 are left"),
        ([9, "float32", 4], b"x" * 17, "1 bytes follow it"),
        ([9, "load", 4], b"x" * 16, "a torch dtype 'load', which this torch does not have"),
        ([9, ["float32"], 4], b"x" * 16, "a torch dtype "),
        ([9], b"", "a torch dtype None"),
        ([10, "|O", 1], b"x" * 8, "a numpy dtype '|O'"),
        (
            [11, "<M8[0s]", b"x" * 8],
            b"",
            "a numpy dtype '<M8[0s]'",
        ),  # numpy itself would end the process: division by zero
        ([10, "<f4,<f4", 1], b"x" * 8, "a numpy dtype '<f4,<f4'"),
        ([10, "|V0", 2**62], b"", "a numpy dtype '|V0'"),
        ([11, "<f4", b"xxx"], b"", "a numpy value of dtype float32 with other than 4 bytes"),
        ([2, [0]], b"", "a set with an element that has no hash"),
        ([2, [1, [9, "float32"]]], b"x" * 4, "a set with a tensor"),
        ([2, 1, True], b"", "a set with the same element twice"),
        ([4, "a", "a", 1, 2], b"", "a dict with the same key twice"),
        ([4, "a"], b"", "a dict with a key and no value"),
        ([4, 1.5, 1], b"", "a dict with a key that is not int, str or bool"),
        ([5], b"", "an OrderedDict that ends too early"),
        ([99, 1], b"", "its tree has a node '[99, 1]'"),
        ([True, 1], b"", "its tree has a node '[True, 1]'"),
        ([-1, 1], b"", "its tree has a node '[-1, 1]'"),
        ({1: 2}, b"", "its tree has a node '{1: 2}'"),
        ([6, "x"], b"", "a node [6, 'x'] without its one bytes"),
        ([7, 2], b"\xff\xff", "text that is not UTF-8"),
        ([8, -5], b"", "a buffer of -5 bytes"),
        ([16, "cuda", 200], b"", "a torch.device ['cuda', 200]"),
        ([16, "nonsense", None], b"", "a torch.device ['nonsense', None]"),
    ],
)
@needs_torch
@needs_numpy
def test_a_malformed_value_says_why(tree: object, buffers: bytes, text: str) -> None:
    headline = malformed(laid_out(tree, buffers))
    assert headline.startswith(f"these are not the bytes of a value: {text}")
    assert len(headline) < 160


def test_deep_trees_are_malformed() -> None:
    node: Any = [0]
    for _ in range(MAX_DEPTH + 5):
        node = [0, node]
    assert malformed(laid_out(node)) == "these are not the bytes of a value: it is nested too deep"


# --- torch ---


def every_dtype(torch: Any) -> list[Any]:
    found = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    return sorted(
        (dtype for dtype in found if not str(dtype).startswith(("torch.q", "torch.quint"))), key=str
    )


def bits(torch: Any, tensor: Any) -> bytes:
    """The elements' bytes in row order, taken by another way than the code under test."""
    if tensor.numel() == 0:
        return b""
    wide = tensor.detach().resolve_conj().resolve_neg()
    if wide.itemsize == 1:
        wide = wide.view(torch.uint8)
    return bytes(wide.contiguous().reshape(-1).view(torch.uint8).numpy())


def alike(torch: Any, one: Any, other: Any) -> bool:
    return (
        type(one) is torch.Tensor
        and (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
        and bits(torch, one) == bits(torch, other)
    )


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_of_every_dtype_and_shape(torch: Any) -> None:
    dtypes = every_dtype(torch)
    assert len(dtypes) >= 40
    for dtype in dtypes:
        raw = torch.arange(24 * dtype.itemsize, dtype=torch.int64).to(torch.uint8) % (
            2 if dtype is torch.bool else 251
        )
        full = raw.view(dtype).view(2, 3, 4)
        for tensor in (
            full,
            full[0, 0, 0],
            full[:0],
            full.permute(2, 0, 1),
            full[:, ::2, 1],
            full[:1].expand(5, 3, 4),
            full[1:, 1:],
        ):
            back = through(tensor)
            assert alike(torch, back, tensor), (dtype, tensor.shape)
            assert back.is_contiguous()
            assert join(encode(back)) == join(encode(tensor))


@pytest.mark.parametrize("elements", [1000, 100_000])
def test_a_tensor_that_was_read_is_memory_of_its_own(torch: Any, elements: int) -> None:
    sent = torch.randn(elements, requires_grad=True)
    back = through(sent)
    assert torch.equal(back, sent)
    assert not back.requires_grad
    back.mul_(2)
    assert not torch.equal(back, sent)
    assert torch.equal(through(torch.nn.Parameter(sent.detach())), sent)
    assert type(through(torch.nn.Parameter(sent.detach()))) is torch.Tensor


def test_views_that_are_to_be_conjugated_or_negated(torch: Any) -> None:
    tensor = torch.randn(3, 4, dtype=torch.complex64)
    for view in (
        tensor.conj(),
        tensor.conj().imag,
        tensor.mH,
        tensor.real,
        torch._neg_view(tensor),
    ):
        back = through(view)
        assert torch.equal(back, view.resolve_conj().resolve_neg())
        assert not back.is_conj()
        assert not back.is_neg()


def test_large_tensors_are_neither_copied_in_nor_out(torch: Any) -> None:
    tensor = torch.randn(500, 500)
    encoded = encode({"w": tensor, "n": 1})
    assert isinstance(encoded, Parts)
    assert sum(map(len, encoded.buffers)) == encoded.size
    tensor[0, 0] = 77.0
    data = alloc(encoded.size)
    data[:] = join(encoded)
    back: Any = decode(data)
    assert back["w"][0, 0] == 77.0
    data[:] = bytes(len(data))
    assert not back["w"].any()
    assert back["w"].data_ptr() % ALIGNMENT == 0


def test_the_memory_of_a_tensor_lives_as_long_as_its_buffer(torch: Any) -> None:
    encoded = encode(torch.arange(1_000_000))
    for _ in range(10):
        torch.empty(1_000_000, dtype=torch.int64).fill_(-1)  # would be written where the tensor was
    assert torch.equal(decode(bytearray(join(encoded))), torch.arange(1_000_000))


def test_encoding_leaves_the_tensor_as_it_was(torch: Any) -> None:
    tensor = torch.randn(100, 300)
    encode(tensor)
    tensor.resize_(1000, 1000)  # after tensor.numpy() this is an error


def test_tied_weights_are_two_tensors_afterwards(torch: Any) -> None:
    weight = torch.randn(4)
    one, other = through([weight, weight])
    assert torch.equal(one, other)
    one.zero_()
    assert torch.equal(other, weight)


def test_sizes_dtypes_and_devices(torch: Any) -> None:
    plain = [
        torch.Size([]),
        torch.Size([2, 0, 3]),
        torch.device("cpu"),
        torch.device("cuda"),
        torch.device("cuda", 3),
        torch.device("meta"),
    ]
    plain += [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
    for value in plain:
        back = through({"v": value})["v"]
        assert type(back) is type(value)
        assert back == value
    assert through({torch.float32, torch.device("cpu"), torch.Size([1])}) == {
        torch.float32,
        torch.device("cpu"),
        torch.Size([1]),
    }


def test_state_dicts_of_models_and_optimizers(torch: Any) -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 2).bfloat16(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), betas=(0.8, 0.99))
    sum(parameter.float().sum() for parameter in model.parameters()).backward()
    optimizer.step()
    state: Any = model.state_dict()
    back = through(state)
    assert type(back) is OrderedDict
    assert list(back) == list(state)
    assert all(alike(torch, back[name], state[name]) for name in state)
    assert same(vars(back), vars(state))
    other = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 2).bfloat16(),
    )
    assert str(other.load_state_dict(back, strict=True)) == "<All keys matched successfully>"
    assert all(
        torch.equal(one, two)
        for one, two in zip(model.parameters(), other.parameters(), strict=True)
    )

    of_optimizer = optimizer.state_dict()
    back = through(of_optimizer)
    assert list(back["state"]) == list(of_optimizer["state"])
    assert type(back["param_groups"][0]["betas"]) is tuple
    assert join(encode(back)) == join(encode(of_optimizer))
    torch.optim.AdamW(other.parameters()).load_state_dict(back)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says that some of these are prototypes
def test_tensors_that_are_more_than_their_memory_are_refused(torch: Any) -> None:
    class Tagged(torch.Tensor):  # type: ignore[misc]
        pass

    eye = torch.eye(3)
    cases = {
        'value["w"]: a sparse tensor (torch.sparse_coo) cannot be stored': eye.to_sparse(),
        'value["w"]: a sparse tensor (torch.sparse_csr) cannot be stored': eye.to_sparse_csr(),
        'value["w"]: a quantized tensor cannot be stored': torch.quantize_per_tensor(
            eye, 0.1, 0, torch.qint8
        ),
        'value["w"]: a nested tensor cannot be stored': torch.nested.nested_tensor([eye, eye]),
        'value["w"]: a meta tensor (it has no data) cannot be stored': torch.empty(
            3, device="meta"
        ),
        'value["w"]: a tensor of 65 dimensions and 1 elements cannot be stored': torch.zeros(
            [1] * 65
        ),
        f'value["w"]: a {Tagged.__module__}.{Tagged.__qualname__} (a subclass of torch.Tensor) cannot be stored': eye.as_subclass(
            Tagged
        ),
        'value["w"]: a torch.nn.modules.linear.Linear cannot be stored': torch.nn.Linear(1, 1),
    }
    for headline, value in cases.items():
        assert refused({"w": value}) == headline
    assert (
        refused({eye})
        == "value{...}: a tensor in a set (it is equal to nothing but itself) cannot be stored"
    )
    with pytest.raises(ValueUnsupported, match="a tensor without memory of its own"):
        torch.vmap(lambda row: encode(row) and row)(eye)


def test_a_tensor_goes_to_the_device_that_was_asked_for(torch: Any) -> None:
    for tensor in (torch.ones(3), torch.ones(0, 2), torch.ones(100_000)):
        assert through([tensor], device="meta")[0].device.type == "meta"
        with torch.device("meta"):  # a default is not a wish
            assert through([tensor])[0].device.type == "cpu"


def test_what_would_be_copied_is_weighed_before(torch: Any) -> None:
    tensor = torch.zeros(1).expand(1 << 50)  # 4 PiB: no machine would get as far as copying it
    for value in (tensor, {"w": [tensor]}):
        with pytest.raises(values.TooLarge) as caught:
            encode(value, limit=1000)
        assert caught.value.size == 1 << 52
    small = torch.arange(100).view(10, 10).t()
    with pytest.raises(values.TooLarge):
        encode([small, small], limit=800)
    assert torch.equal(decode(join(encode(small, limit=800))), small)


@pytest.mark.gpu
def test_cuda_tensors_go_through_the_host(torch: Any) -> None:
    for tensor in (
        torch.randn(300, 400, device="cuda"),
        torch.randn(4, 5, device="cuda").t(),
        torch.tensor(1j, device="cuda").conj(),
    ):
        assert torch.equal(through(tensor), tensor.cpu())
        back = through([tensor], device="cuda")[0]
        assert back.is_cuda
        assert torch.equal(back, tensor)


# --- numpy ---


def test_arrays_and_scalars_of_every_dtype(numpy: Any) -> None:
    names = [
        name for name in numpy.typecodes["All"] if name not in "OSUVMmgG"
    ]  # longdouble is refused
    dtypes = [numpy.dtype(name).newbyteorder(order) for name in names for order in "<>"]
    dtypes += map(
        numpy.dtype, ["S3", "U4", ">U4", "V5", "M8[ns]", ">M8[25s]", "m8[D]", "M8", "m8[us]"]
    )
    for dtype in dtypes:
        full = numpy.frombuffer(
            bytes(24 * dtype.itemsize)
            if dtype.kind in "bU"
            else bytes(range(1, 241)) * 4 * dtype.itemsize,
            dtype,
            count=24,
        )
        full = full.reshape(2, 3, 4)
        for array in (
            full,
            full[0, 0, 0, None][0:1].reshape(()),
            full[:0],
            full.T,
            full[:, ::2, 1],
            numpy.asfortranarray(full),
            full[::-1],
        ):
            back = through(array)
            assert type(back) is numpy.ndarray
            assert (back.dtype, back.shape) == (array.dtype, array.shape)
            assert back.tobytes() == array.tobytes()
            assert back.flags.writeable
            assert join(encode(back)) == join(encode(array))
        scalar = full[1, 1, 1]
        back = through([scalar])[0]
        assert back.tobytes() == scalar.tobytes()
        assert back.dtype == scalar.dtype
        assert type(back) is type(scalar) or numpy.dtype(type(scalar)) == numpy.dtype(
            type(back)
        )  # longlong is int64 by another name


def test_numpy_text_keeps_what_an_array_would_cut_off(numpy: Any) -> None:
    for value in (
        numpy.str_("a\0"),
        numpy.str_(""),
        numpy.str_("\ud800"),
        numpy.bytes_(b"a\0\0"),
        numpy.bytes_(b"x" * 5000),
    ):
        back = through([value])[0]
        assert type(back) is type(value)
        assert back == value


def test_large_arrays_are_neither_copied_in_nor_out(numpy: Any) -> None:
    array = numpy.arange(100_000.0)
    encoded = encode(array)
    assert isinstance(encoded, Parts)
    array[0] = 77
    data = bytearray(join(encoded))
    back: Any = decode(data)
    assert back[0] == 77
    data[-8:] = struct.pack("d", 5.0)
    assert back[-1] == 5.0


def test_an_array_that_would_be_copied_is_weighed_before(numpy: Any) -> None:
    with pytest.raises(values.TooLarge) as caught:
        encode(numpy.broadcast_to(numpy.zeros(1), (1 << 50,)), limit=1000)
    assert caught.value.size == 1 << 53


def test_arrays_that_are_more_than_their_memory_are_refused(numpy: Any) -> None:
    class Table(numpy.ndarray):  # type: ignore[misc]
        pass

    record = numpy.zeros(2, [("x", "f4"), ("y", "i4")])
    assert (
        refused([numpy.array([object()])])
        == "value[0]: a numpy array of dtype object (Python objects) cannot be stored"
    )
    assert (
        refused(record)
        == "value: a numpy array of dtype [('x', '<f4'), ('y', '<i4')] cannot be stored"
    )
    assert (
        refused(record[0])
        == "value: a numpy value of dtype [('x', '<f4'), ('y', '<i4')] cannot be stored"
    )
    assert refused(numpy.zeros(2).view(Table)).endswith(
        "Table (a subclass of numpy.ndarray) cannot be stored"
    )
    assert refused(numpy.ma.masked_array([1], [True])).endswith(
        "(a subclass of numpy.ndarray) cannot be stored"
    )
    assert (
        refused(numpy.ndarray((2,), "V0")) == "value: a numpy array of dtype |V0 cannot be stored"
    )


# --- pickle ---


def test_without_allow_pickle_nothing_is_pickled_or_unpickled() -> None:
    data = join(encode({"cfg": Config(lr=0.1)}, allow_pickle=True))
    with pytest.raises(
        ValueUnsupported, match="the value was pickled, and this client does not unpickle"
    ) as caught:
        decode(data)
    assert caught.value.code == "value-unsupported"
    assert caught.value.help[0][1] == "rallypoint.connect(..., allow_pickle=True)"


def test_with_allow_pickle_only_what_is_no_value_is_pickled(torch: Any) -> None:
    value = {
        "cfg": Config(lr=0.1),
        "w": torch.ones(50_000),
        "c": Color.RED,
        "s": torch.eye(2).to_sparse(),
        "k": {(1, 2): 3},
    }
    encoded = encode(value, allow_pickle=True)
    assert size_of(encoded) < 205_000
    back: Any = decode(bytearray(join(encoded)), allow_pickle=True)
    assert vars(back["cfg"]) == {"lr": 0.1}
    assert back["c"] is Color.RED
    assert back["k"] == {(1, 2): 3}
    assert torch.equal(back["s"].to_dense(), torch.eye(2))
    assert torch.equal(back["w"], value["w"])
    assert decode(join(encode({Color.RED, 5}, allow_pickle=True)), allow_pickle=True) == {
        Color.RED,
        5,
    }


def test_what_cannot_be_pickled_is_named() -> None:
    value = {"cfg": Config(lr_schedule=lambda step: 0.1)}
    what = f'value["cfg"]: a {HERE}.Config cannot be pickled ('
    assert refused(value, allow_pickle=True).startswith(what)


def test_a_pickle_that_cannot_be_read_here_says_so() -> None:
    data = laid_out([17, 5], b"\x80\x05abc")
    with pytest.raises(ValueUnsupported, match="the value cannot be unpickled: ") as caught:
        decode(data, allow_pickle=True)
    assert caught.value.code == "value-unsupported"


# --- memory, and modules that are not there ---


@pytest.mark.parametrize("size", [1, 100, 65_537, 5_000_000])
def test_alloc_gives_that_much_writable_memory(size: int) -> None:
    memory = alloc(size)
    assert (len(memory), memory.format, memory.readonly, memory.contiguous) == (
        size,
        "B",
        False,
        True,
    )
    memory[0], memory[-1] = 1, 1
    if "numpy" in sys.modules:
        assert sys.modules["numpy"].frombuffer(memory, "u1").ctypes.data % ALIGNMENT == 0


def alone(program: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plain_values_load_neither_torch_nor_numpy_nor_pickle() -> None:
    program = """
import sys
from rallypoint.wire.values import alloc, decode, encode, join
before = set(sys.modules)
value = {"a": [1, 2.5, None, 2**80, "\\ud800"], "b": {1, 2}, "c": b"x" * 100_000}
data = alloc(5_000_000)
encoded = join(encode(value))
data[:len(encoded)] = encoded
assert decode(data[:len(encoded)]) == value
try:
    encode([print])
except TypeError:
    pass
print({"torch", "numpy", "pickle", "ctypes"} & (set(sys.modules) - before))
"""
    assert alone(program).strip() == "set()"


@pytest.mark.parametrize(
    ("module", "tree"),
    [("torch", [9, "float32", 1]), ("numpy", [10, "<f4", 1]), ("torch", [16, "cpu", None])],
)
def test_a_value_that_needs_a_module_which_is_not_there_names_it(
    module: str, tree: list[object]
) -> None:
    program = f"""
import sys
sys.modules[{module!r}] = None
from rallypoint.wire.values import decode
try:
    decode(bytes.fromhex({laid_out(tree, b"abcd").hex()!r}))
except TypeError as error:
    print(error.code, error)
"""
    assert alone(program).startswith(
        f"value-unsupported the value needs {module}, which cannot be imported here"
    )


def test_a_module_of_the_same_name_is_not_taken_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert refused(Config()) == f"value: a {HERE}.Config cannot be stored"


def test_the_state_of_a_scheduler_with_milestones() -> None:
    """`MultiStepLR.state_dict()` has a Counter in it, and could not be stored."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    state = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5]).state_dict()
    back = through(state)
    assert type(back["milestones"]) is collections.Counter
    assert back["milestones"] == {3: 1, 5: 2}
    assert back == state
    marked = collections.Counter("aab")
    marked.source = "x"  # type: ignore[attr-defined]
    assert refused(marked) == "value: a Counter with an attribute 'source' cannot be stored"


@pytest.mark.parametrize(
    "number", [1j, 0j, complex(-0.0, float("inf")), complex(float("nan"), -0.0)]
)
def test_a_complex_number(number: complex) -> None:
    back = through([number])[0]
    assert (struct.pack("<2d", back.real, back.imag), type(back)) == (
        struct.pack("<2d", number.real, number.imag),
        complex,
    )


@pytest.mark.parametrize(
    ("noun", "said"),
    [
        ("int", "an int"), ("uuid.UUID", "a uuid.UUID"), ("NT", "an NT"), ("UNet", "a UNet"), ("LSTMCell", "an LSTMCell"),
        ("OrderedDict", "an OrderedDict"), ("UserDict", "a UserDict"), ("OneCycleLR", "a OneCycleLR"), ("OSError", "an OSError"),
        ("Server", "a Server"), ("numpy.int64", "a numpy.int64"), ("Ufoo", "an Ufoo"), ("_Mine", "a _Mine"), ("Unpickler", "an Unpickler"),
    ],
)  # fmt: skip
def test_articles(noun: str, said: str) -> None:
    """ "an uuid.UUID", "a NT"."""
    assert values.article(noun) == said

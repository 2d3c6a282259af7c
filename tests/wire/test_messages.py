"""Messages: each comes back as it was, and bytes that are none are refused and nothing else."""

from __future__ import annotations

import contextlib
import types
import typing
from collections.abc import Callable
from typing import Any, ClassVar, get_args, get_origin

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from rallypoint.wire import messages
from rallypoint.wire.messages import AnyHandshake, AnyReply, AnyRequest, Reply, Request

from ..search import tries

Decode = Callable[[bytes], Any]
KINDS: tuple[tuple[Any, Decode], ...] = (
    (AnyHandshake, messages.decode_handshake),
    (AnyRequest, messages.decode_request),
    (AnyReply, messages.decode_reply),
)
EVERY = [
    pytest.param(message, decode, id=message.__name__)
    for union, decode in KINDS
    for message in get_args(union)
]
DECODERS = [
    pytest.param(decode, id=name)
    for name, (_, decode) in zip(("handshake", "request", "reply"), KINDS, strict=True)
]

# What a decoder raises, and so what whoever calls one must catch. Python's own two come out of
# msgspec as they are: text that is not UTF-8, and nesting (in what a newer version would have added
# to a message, which is passed over).
REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def any_of(hint: Any) -> some.SearchStrategy[Any]:
    """Any value of a field of this type."""
    plain: dict[object, some.SearchStrategy[Any]] = {
        bool: some.booleans(),
        int: some.integers(-(2**63), 2**63 - 1),
        float: some.floats(allow_nan=False),
        str: some.text(max_size=20),
        bytes: some.binary(max_size=40),
        type(None): some.none(),
    }
    if hint in plain:
        return plain[hint]
    if hint is messages.Number:
        return some.integers(0, 2**62)
    if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        return some.lists(any_of(get_args(hint)[0]), max_size=3).map(tuple)
    if get_origin(hint) is tuple:
        return some.tuples(*map(any_of, get_args(hint)))
    if get_origin(hint) in {types.UnionType, typing.Union}:
        return some.one_of(*map(any_of, get_args(hint)))
    assert issubclass(hint, msgspec.Struct), hint
    return some.builds(hint, **{name: any_of(field) for name, field in fields_of(hint).items()})


def fields_of(struct: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(struct, include_extras=True)
    return {
        name: hints[name]
        for name in struct.__struct_fields__
        if get_origin(hints[name]) is not ClassVar
    }


every_message = some.one_of(*(any_of(message) for union, _ in KINDS for message in get_args(union)))


@pytest.mark.parametrize(("message", "decode"), EVERY)
def test_every_message_comes_back_as_it_was_or_is_refused(message: Any, decode: Decode) -> None:
    """Whole it comes back; what a newer version adds to it is passed over; truncated it is refused.
    They are asked of the same messages: to think of these takes most of the time.
    """

    @tries(40)
    @given(any_of(message), some.data())
    def check(sent: Any, data: some.DataObject) -> None:
        encoded = messages.encode(sent)
        got = decode(encoded)
        assert type(got) is message
        assert got == sent
        longer = [*msgspec.msgpack.decode(encoded), "more", {"of": [1, b"2"]}]
        assert decode(msgspec.msgpack.encode(longer)) == sent
        with pytest.raises(REFUSED):
            decode(encoded[: data.draw(some.integers(0, len(encoded) - 1))])

    check()


@pytest.mark.parametrize("decode", DECODERS)
def test_random_bytes_are_refused_and_nothing_else(decode: Decode) -> None:
    @tries(300)
    @given(some.binary(max_size=200))
    @example(b"")
    @example(b"\xc1")
    @example(b"\xdd\xff\xff\xff\xff")  # an array of four thousand million elements that never come
    @example(b"\x93\x02\x01\xc6\xff\xff\xff\xff")
    def check(data: bytes) -> None:
        try:
            decode(data)
        except REFUSED:
            pass  # the other thing that may happen

    check()


@pytest.mark.parametrize("decode", DECODERS)
def test_mutated_messages_are_accepted_or_refused_and_nothing_else(decode: Decode) -> None:
    @tries(300)
    @given(every_message, some.data())
    def check(message: Any, data: some.DataObject) -> None:
        encoded = bytearray(messages.encode(message))
        for _ in range(data.draw(some.integers(1, 4))):
            at = data.draw(some.integers(0, len(encoded)))
            encoded[at : at + data.draw(some.integers(0, 3))] = data.draw(some.binary(max_size=3))
        try:
            decode(bytes(encoded))
        except REFUSED:
            pass  # the other thing that may happen

    check()


@pytest.mark.parametrize(("message", "decode"), EVERY)
@pytest.mark.parametrize("levels", [90, 2000, 500_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\x01"])
def test_deep_nesting_is_refused_wherever_it_is(
    message: Any, decode: Decode, levels: int, opening: bytes
) -> None:
    deep = msgspec.Raw(opening * levels + b"\xc0")
    fields: list[Any] = msgspec.msgpack.decode(messages.encode(example_of(message)))
    for place in range(len(fields)):
        with pytest.raises(REFUSED):
            decode(msgspec.msgpack.encode([*fields[:place], deep, *fields[place + 1 :]]))
    longer = msgspec.msgpack.encode([*fields, deep])
    if levels < 100:
        decode(longer)
    elif levels > 100_000:
        with pytest.raises(RecursionError):
            decode(longer)
    else:
        # since Python 3.12 code in C may go deeper than code in Python, and what comes after the
        # fields that we know is read over
        with contextlib.suppress(RecursionError):
            decode(longer)


def example_of(message: Any) -> Any:
    """One message of this type, in which no field is None: a place for which anything else is
    wrong.
    """
    simple: dict[object, object] = {bool: True, int: 7, float: 0.5, str: "text", bytes: b"bytes"}

    def one(hint: Any) -> Any:
        if hint is messages.Number:
            return simple[int]
        if hint in simple:
            return simple[hint]
        if get_origin(hint) is tuple:
            return tuple(one(each) for each in get_args(hint) if each is not ...)
        if get_origin(hint) in {types.UnionType, typing.Union}:
            return one(get_args(hint)[0])
        return example_of(hint)

    return message(**{name: one(field) for name, field in fields_of(message).items()})


@pytest.mark.parametrize(("message", "decode"), EVERY)
def test_text_that_is_not_utf_8_is_refused(message: Any, decode: Decode) -> None:
    encoded = messages.encode(example_of(message))
    for place in range(len(encoded)):
        if encoded.startswith(b"\xa4text", place):
            with pytest.raises(UnicodeDecodeError):
                decode(encoded[:place] + b"\xa4te\xfft" + encoded[place + 5 :])


@pytest.mark.parametrize("union", [union for union, _ in KINDS])
def test_no_two_messages_have_the_same_number(union: Any) -> None:
    numbers = [message.__struct_config__.tag for message in get_args(union)]
    assert len(set(numbers)) == len(numbers)


def test_every_message_of_the_module_can_be_received() -> None:
    assert set(Request.__subclasses__()) == set(get_args(AnyRequest))
    assert set(Reply.__subclasses__()) == set(get_args(AnyReply))


def test_what_changes_something_can_be_told_from_what_does_not() -> None:
    reads = {"Ping", "Get", "Keys", "Exists", "Length", "Watch", "Status", "Cancel", "Release"}
    assert {request.__name__ for request in get_args(AnyRequest) if not request.changes} == reads


def test_the_bytes_of_the_protocol() -> None:
    # A client and a server of different releases must agree on these; change VERSIONS before
    # changing this test.
    hello = messages.Hello("rallypoint", 1, 1, "0.2", "job", b"s", b"n", "unix")
    assert (
        messages.encode(hello)
        == b"\x99\x01\xaarallypoint\x01\x01\xa30.2\xa3job\xc4\x01s\xc4\x01n\xa4unix"
    )
    assert messages.encode(messages.Get(3, 2, "k")) == b"\x95\x02\x03\x02\xa1k\xc0"
    assert messages.encode(messages.Add(4, 3, "n", -1)) == b"\x96\x08\x04\x03\xa1n\xff\xc2"
    assert (
        messages.encode(messages.Value(3, 9, 8, b"\x01")) == b"\x96\x02\x03\x09\x08\xc4\x01\x01\x00"
    )
    assert messages.encode(messages.Done(4, 10)) == b"\x95\x01\x04\x0a\x00\xa0"


@pytest.mark.parametrize("number", [-1, 2**62 + 1, 2**63, 2**64 - 1])
def test_a_request_has_a_number_that_the_server_can_count_with(number: int) -> None:
    for request in (
        messages.Ping(number, 0),
        messages.Ping(1, number),
        messages.Cancel(0, 0, number),
    ):
        with pytest.raises(msgspec.ValidationError):
            messages.decode_request(messages.encode(request))

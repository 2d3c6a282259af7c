from __future__ import annotations

import pytest

from rallypoint.errors import UsageError
from rallypoint.store.address import Address, parse


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:41235", Address("127.0.0.1", 41235)),
        ("tcp://node07.cluster:1", Address("node07.cluster", 1)),
        ("tcp://[::1]:65535", Address("::1", 65535)),
        ("unix:///run/user/0/x.sock", Address(path="/run/user/0/x.sock")),
    ],
)
def test_an_address_reads_and_writes_the_same(text: str, address: Address) -> None:
    assert parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "tcp://127.0.0.1:41235/",
        " tcp://127.0.0.1:41235\n",
        "tcp://[::1]:41235/ ",
        " unix:///tmp/x.sock/",
    ],
)
def test_what_copying_leaves_around_an_address_is_no_part_of_it(text: str) -> None:
    assert str(parse(text)) == text.strip().removesuffix("/")


def test_quotes_are_named() -> None:
    with pytest.raises(UsageError, match="there are quotes around it"):
        parse("'tcp://127.0.0.1:41235'")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("127.0.0.1:29500", "tcp://127.0.0.1:29500"),
        ("/tmp/x.sock", "unix:///tmp/x.sock"),
        ("unix://tmp/x.sock", "unix:///tmp/x.sock"),
        ("http://host:80", "tcp://host:80"),
        ("tcp://host", "tcp://host:29500"),
        ("tcp://host:", "tcp://host:29500"),
        ("tcp://host:x", "tcp://host:29500"),
        ("tcp://host:70000", "tcp://host:29500"),
        ("tcp://host:0", "tcp://host:29500"),
        ("tcp://::1:46031", "tcp://[::1]:46031"),
        ("tcp://fe80::1:46031/", "tcp://[fe80::1]:46031"),
        ("tcp://::1", "tcp://[::1]:29500"),
        ("tcp://[::1]", "tcp://[::1]:29500"),
        ('"tcp://127.0.0.1:46031"', "tcp://127.0.0.1:46031"),
        (" 'unix:///run/x.sock' ", "unix:///run/x.sock"),
        ("tcp://:29500", "tcp://127.0.0.1:29500"),
        ("", "tcp://:29500"),
    ],
)
def test_a_malformed_address_is_answered_with_one_that_would_do(text: str, right: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert caught.value.code == "address-malformed"
    assert caught.value.help[0][1] == right or not text

"""Addresses as sockets take them."""

from __future__ import annotations

import socket

from rallypoint.host.loopback import is_loopback
from rallypoint.host.socket_addresses import address_of, by_turns, is_own, numeric, places_of


def test_an_address_stands_for_itself_and_a_name_for_what_it_means() -> None:
    assert places_of("192.0.2.1", 1.0) == [(socket.AF_INET, ("192.0.2.1", 0))]
    assert any(place[1][0] in ("127.0.0.1", "::1") for place in places_of("localhost", 10.0))
    assert numeric("localhost", 1) == []


def test_only_an_address_of_this_machine_is_its_own() -> None:
    assert is_own(numeric("127.0.0.1", 0))
    assert is_own([*numeric("192.0.2.1", 0), *numeric("127.0.0.5", 0)])
    assert not is_own(numeric("192.0.2.1", 0))  # RFC 5737: nobody's
    assert not is_own([])


def test_families_take_turns() -> None:
    four, six = numeric("192.0.2.1", 1) * 2, numeric("2001:db8::1", 1)
    assert by_turns([*four, *six]) == [four[0], six[0], four[1]]
    assert (address_of("::1", 80), address_of("127.0.0.1", 80)) == ("[::1]:80", "127.0.0.1:80")


def test_names_of_loopback() -> None:
    assert all(map(is_loopback, ("localhost", "[::1]", "LOCALHOST", "127.0.0.1")))
    assert not is_loopback("10.0.0.1")

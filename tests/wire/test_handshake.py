"""The handshake as a table: who proves what to whom, and what each side makes of anything else."""

from __future__ import annotations

import contextlib
import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.wire import handshake
from rallypoint.wire.handshake import (
    NONCE_BYTES,
    SESSION_BYTES,
    Accepting,
    HandshakeFailed,
    Joining,
    proof_of,
)
from rallypoint.wire.messages import (
    TAG,
    VERSIONS,
    Challenge,
    Hello,
    Identity,
    Limits,
    Proof,
    Refusal,
    Welcome,
    encode,
)

SECRET = b"a secret of at least sixteen bytes"
WELCOME = Welcome(b"s" * 16, "0.1.0", Limits(1, 1, 1, 1, 1, 1), "", 0, 10.0)


def joining(
    secret: bytes = SECRET, job: str = "", session: bytes = b"x" * SESSION_BYTES
) -> Joining:
    who = Identity("node07", 123, 3)
    return Joining(
        secret,
        job,
        "0.1.0",
        session=session,
        nonce=os.urandom(NONCE_BYTES),
        identity=who,
        ttl=10.0,
        resume=False,
        acked=0,
    )


def accepting(secret: bytes = SECRET, job: str = "", way: str = "unix") -> Accepting:
    return Accepting(secret, job, "0.1.0", os.urandom(NONCE_BYTES), way)


def test_both_sides_prove_themselves_and_the_conversation_is_open() -> None:
    client, server = joining(), accepting()
    challenge = server.receive(client.start())
    assert isinstance(challenge, Challenge)
    answer = client.receive(encode(challenge))
    assert isinstance(answer, bytes)
    proof = server.receive(answer)
    assert isinstance(proof, Proof)
    assert (proof.identity, proof.ttl) == (Identity("node07", 123, 3), 10.0)
    assert client.receive(encode(WELCOME)) == WELCOME
    assert client.state == server.state == "open"


def test_the_client_says_nothing_to_a_server_that_does_not_know_the_secret() -> None:
    client, server = joining(), accepting(secret=b"another secret, also long enough")
    challenge = server.receive(client.start())
    with pytest.raises(HandshakeFailed) as caught:
        client.receive(encode(challenge))
    assert caught.value.reason == "wrong-secret"
    assert client.state == "closed"


def test_a_client_that_does_not_know_the_secret_is_refused() -> None:
    server = accepting()
    hello = joining().hello
    assert isinstance(server.receive(encode(hello)), Challenge)
    with pytest.raises(HandshakeFailed) as caught:
        server.receive(encode(Proof(b"0" * 32, 10.0, Identity("h", 1), False, 0)))
    assert caught.value.refusal is not None
    assert caught.value.refusal.code == "wrong-secret"
    assert server.state == "closed"


def test_a_recorded_handshake_is_worth_nothing() -> None:
    client, server = joining(), accepting()
    challenge = server.receive(client.start())
    recorded = client.receive(encode(challenge))
    assert isinstance(recorded, bytes)
    again = accepting()
    again.receive(client.start())
    with pytest.raises(HandshakeFailed, match="secret"):
        again.receive(recorded)


def test_the_servers_proof_cannot_be_sent_back_as_the_clients() -> None:
    server = accepting()
    hello = joining().hello
    challenge = server.receive(encode(hello))
    assert isinstance(challenge, Challenge)
    with pytest.raises(HandshakeFailed, match="secret"):
        server.receive(encode(Proof(challenge.proof, 10.0, Identity("h", 1), False, 0)))


@pytest.mark.parametrize("change", ["session", "job", "software", "nonce", "newest"])
def test_a_proof_is_for_what_was_said_and_nothing_else(change: str) -> None:
    hello = joining(job="j").hello
    other = {"session": b"y" * 16, "job": "k", "software": "9.9", "nonce": b"n" * 32, "newest": 7}[
        change
    ]
    changed = msgspec.structs.replace(hello, **{change: other})
    assert proof_of(SECRET, "client", 1, hello, b"n", "j", b"") != proof_of(
        SECRET, "client", 1, changed, b"n", "j", b""
    )


@pytest.mark.parametrize(
    ("dialled", "arrived"),
    [
        ("unix", "tcp 127.0.0.1 29500"),
        ("tcp", "unix"),
        ("tcp 127.0.0.1 29500", "unix"),
        ("tcp 127.0.0.1 29501", "tcp 127.0.0.1 29500"),
        ("tcp 192.0.2.7 29500", "tcp 192.0.2.1 29500"),
        ("tcp 192.0.2.1 2950", "tcp 192.0.2.1 29500"),
    ],
)
def test_a_greeting_that_arrived_elsewhere_is_refused_before_the_server_proves_anything(
    dialled: str, arrived: str
) -> None:
    """Whoever was at an address that a client was given, or at the path of a Unix socket that a
    store announced, could forward the handshake to the real store, and had an open connection there
    without knowing the secret."""
    with pytest.raises(HandshakeFailed) as caught:
        accepting(way=arrived).receive(joining().start(dialled))
    assert caught.value.reason == "store-relayed"
    assert caught.value.refusal is not None
    assert dialled in caught.value.refusal.text
    assert arrived in caught.value.refusal.text


@pytest.mark.parametrize(
    ("dialled", "arrived"),
    [("unix", "unix"), ("tcp ::1 29500", "tcp ::1 29500"), ("tcp", "tcp 10.0.0.1 29500")],
)
def test_a_greeting_that_arrived_where_it_was_sent_or_is_forwarded_on_purpose_is_accepted(
    dialled: str, arrived: str
) -> None:
    assert isinstance(accepting(way=arrived).receive(joining().start(dialled)), Challenge)


def test_who_passes_a_greeting_on_cannot_change_where_it_was_sent() -> None:
    client, server = joining(), accepting(way="tcp 192.0.2.1 29500")
    client.start("tcp 192.0.2.7 29500")
    challenge = server.receive(
        encode(msgspec.structs.replace(client.hello, way="tcp 192.0.2.1 29500"))
    )
    with pytest.raises(HandshakeFailed) as caught:
        client.receive(encode(challenge))
    assert caught.value.reason == "wrong-secret"


@pytest.mark.parametrize("code", ["session-lost", "wrong-secret"])
def test_what_only_the_server_can_know_is_not_taken_from_who_has_proved_nothing(code: str) -> None:
    """A stranger's `session-lost` with `known` and nothing in `happened` was believed: the client
    then told its program that a request which had been carried out had not."""
    with pytest.raises(HandshakeFailed) as caught:
        joining().receive(encode(Refusal(code, "", known=True)))
    assert caught.value.reason == "foreign"
    assert caught.value.refusal is None
    client, server = joining(), accepting()
    client.receive(encode(server.receive(client.start())))
    with pytest.raises(HandshakeFailed) as proved:
        client.receive(encode(Refusal(code, "", known=True)))
    assert proved.value.reason == code


def test_another_version_is_told_both(monkeypatch: pytest.MonkeyPatch) -> None:
    client = joining()
    newer = msgspec.structs.replace(
        client.hello, oldest=VERSIONS[1] + 1, newest=VERSIONS[1] + 3, software="3.0.0"
    )
    with pytest.raises(HandshakeFailed) as caught:
        accepting().receive(encode(newer))
    text = str(caught.value)
    assert "2 to 4" in text
    assert "3.0.0" in text
    assert "protocol" in text
    assert "0.1.0" in text
    refusal = caught.value.refusal
    assert refusal is not None
    assert (refusal.code, refusal.oldest, refusal.newest) == ("version-skew", *VERSIONS)
    with pytest.raises(HandshakeFailed) as heard:
        client.receive(encode(refusal))
    assert heard.value.reason == "version-skew"
    assert str(heard.value) == text


def test_the_newest_version_that_both_speak_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    client = joining()
    monkeypatch.setattr(handshake, "VERSIONS", (1, 5))
    newer = msgspec.structs.replace(client.hello, oldest=1, newest=3)
    challenge = accepting().receive(encode(newer))
    assert isinstance(challenge, Challenge)
    assert challenge.version == 3


def test_a_client_of_another_job_is_told_whose_store_this_is() -> None:
    with pytest.raises(HandshakeFailed) as caught:
        accepting(job="tuesday").receive(encode(joining(job="monday").hello))
    assert caught.value.reason == "wrong-job"
    assert "tuesday" in str(caught.value)
    assert "monday" in str(caught.value)


@pytest.mark.parametrize(("client_job", "server_job"), [("", "a"), ("a", ""), ("", ""), ("a", "a")])
def test_a_side_that_names_no_job_does_not_care(client_job: str, server_job: str) -> None:
    client, server = joining(job=client_job), accepting(job=server_job)
    answer = client.receive(encode(server.receive(client.start())))
    assert isinstance(answer, bytes)
    assert isinstance(server.receive(answer), Proof)


@pytest.mark.parametrize(
    "hello",
    [
        Hello("other", 1, 1, "", "", b"x" * 16, b"n" * 32),
        Hello(TAG, 1, 1, "", "", b"x" * 15, b"n" * 32),
        Hello(TAG, 1, 1, "", "", b"x" * 16, b""),
        Hello(TAG, 2, 1, "", "", b"x" * 16, b"n" * 32),
    ],
)
def test_a_greeting_that_is_not_ours_is_foreign(hello: Hello) -> None:
    with pytest.raises(HandshakeFailed) as caught:
        accepting().receive(encode(hello))
    assert caught.value.reason == "foreign"
    assert caught.value.refusal is None


def test_messages_out_of_turn_close_the_conversation() -> None:
    server = accepting()
    with pytest.raises(HandshakeFailed, match="Proof where the hello"):
        server.receive(encode(Proof(b"", 1.0, Identity("h", 1), False, 0)))
    client = joining()
    with pytest.raises(HandshakeFailed, match="answered the hello with a Welcome"):
        client.receive(encode(WELCOME))
    assert client.state == server.state == "closed"


def test_a_refusal_that_is_not_in_the_protocol_is_foreign() -> None:
    with pytest.raises(HandshakeFailed) as caught:
        joining().receive(encode(Refusal("because", "no")))
    assert caught.value.reason == "foreign"


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_an_answer_or_a_failed_handshake(data: bytes, server: bool) -> None:
    side = accepting() if server else joining()
    with contextlib.suppress(HandshakeFailed):
        side.receive(data)


@given(st.data())
def test_a_damaged_handshake_is_refused_or_understood(data: st.DataObject) -> None:
    client, server = joining(), accepting()
    said = bytearray(client.start())
    at = data.draw(st.integers(0, len(said) - 1))
    said[at] ^= data.draw(st.integers(1, 255))
    try:
        challenge = server.receive(bytes(said))
        answer = client.receive(encode(challenge))
    except HandshakeFailed:
        return
    pytest.fail(f"the client went on although its greeting was changed: {answer!r}")


# --- TLS ---


def with_tls(server: bytes, client: bytes) -> tuple[Accepting, Joining, bytes | Welcome]:
    """A handshake of sides that saw these certificates, up to the client's proof."""
    accepts = Accepting(SECRET, "", "0.1.0", os.urandom(NONCE_BYTES), "unix", server)
    joins = joining()
    challenge = accepts.receive(joins.start())
    return accepts, joins, joins.receive(encode(challenge), client)


def test_sides_that_saw_the_same_certificate_open_the_conversation() -> None:
    accepts, _, proof = with_tls(b"c" * 32, b"c" * 32)
    assert isinstance(proof, bytes)
    assert isinstance(accepts.receive(proof), Proof)


@pytest.mark.parametrize(
    ("server", "client"), [(b"c" * 32, b"d" * 32), (b"c" * 32, b""), (b"", b"d" * 32)]
)
def test_a_client_that_saw_another_certificate_proves_nothing(server: bytes, client: bytes) -> None:
    with pytest.raises(HandshakeFailed) as caught:
        with_tls(server, client)
    assert caught.value.reason == "tls-intercepted"


def test_somebody_in_between_cannot_say_that_the_certificate_is_the_servers() -> None:
    accepts = Accepting(SECRET, "", "0.1.0", os.urandom(NONCE_BYTES), "unix", b"c" * 32)
    joins = joining()
    challenge = accepts.receive(joins.start())
    assert isinstance(challenge, Challenge)
    forged = msgspec.structs.replace(challenge, binding=b"d" * 32)
    with pytest.raises(HandshakeFailed) as caught:
        joins.receive(encode(forged), b"d" * 32)
    assert caught.value.reason == "wrong-secret"


def test_the_clients_proof_covers_the_certificate_too() -> None:
    hello = joining().hello
    one, other = (
        proof_of(SECRET, "client", 1, hello, b"n", "", binding) for binding in (b"c" * 32, b"")
    )
    assert one != other

"""One side of one conversation: hello, proof, open, closed (a table).

    client                          server
    Hello(nonce, session)  ──────►
                           ◄──────  Challenge(nonce, proof)     or Refusal: other version, other job
    Proof(proof, identity) ──────►                              the client has seen that the server knows the secret
                           ◄──────  Welcome                     or Refusal: wrong secret, session lost, full, closing
    requests               ◄─────►  replies

Each proof is HMAC-SHA256 under the job's secret over everything both sides have said so far and the
role of the one who proves: a proof cannot be replayed (both nonces are in it), nor sent back (the
role is), nor made to fit another job, session or version. Nor can it be passed on: the hello says
what the client connected to ("unix", or "tcp" with the address and port at the other end of its
connection), and the server refuses a connection that did not arrive there. Where something forwards
connections on purpose, the client leaves address and port out. Nothing but `Hello` and `Proof`, of
at most `HELLO_BYTES`, is decoded before the client has proved itself.

Without TLS this keeps strangers and other jobs out. It does not protect what follows from somebody
who can alter packets. With TLS each proof also covers the server's certificate, as its side saw it:
the challenge says under the proof which one the server has, so that a client tells an attacker in
between, which has another one, from a server that does not know the secret.
"""

from __future__ import annotations

import hmac
from math import inf
from typing import Literal

import msgspec

from rallypoint.wire.messages import (
    REFUSALS,
    TAG,
    UNDECODABLE,
    VERSIONS,
    Challenge,
    Hello,
    Identity,
    Proof,
    Refusal,
    Welcome,
    decode_handshake,
    encode,
)

SECRET_BYTES = 16
"""The shortest secret: below 128 bits a recorded handshake could be searched for it."""

NONCE_BYTES = 32
SESSION_BYTES = 16

Reason = Literal[
    "foreign", "wrong-secret", "version-skew", "wrong-job", "store-relayed", "tls-mismatch", "tls-intercepted", "session-lost",
    "store-full", "store-closed",
]  # fmt: skip

PROVED = ("wrong-secret", "session-lost")
"""Refusals that a server sends after it has proved itself: a stranger's word on what became of a
request would be believed."""


class HandshakeFailed(Exception):
    """The conversation does not come about. `refusal`: what the other side said, or what is to be
    said to it before closing."""

    def __init__(self, reason: Reason, text: str, refusal: Refusal | None = None) -> None:
        super().__init__(text)
        self.reason: Reason = reason
        self.refusal = refusal


def proof_of(
    secret: bytes,
    role: Literal["client", "server"],
    version: int,
    hello: Hello,
    challenge_nonce: bytes,
    job: str,
    binding: bytes,
) -> bytes:
    """Return the 32 bytes with which `role` proves that it knows the secret. `binding`: SHA-256 of
    the server's certificate, b"" without TLS."""
    said = msgspec.msgpack.encode((TAG, role, version, hello, challenge_nonce, job, binding))
    return hmac.digest(secret, said, "sha256")


class Accepting:
    """The server's side. States: hello → proof → open; any of them → closed."""

    def __init__(
        self,
        secret: bytes,
        job: str,
        software: str,
        nonce: bytes,
        way: str = "",
        binding: bytes = b"",
    ) -> None:
        """`job`: "" accepts clients of any. `nonce`: NONCE_BYTES random bytes, of this connection
        alone. `way`: where the connection arrived. `binding`: see `proof_of`."""
        self.state: Literal["hello", "proof", "open", "closed"] = "hello"
        self.hello: Hello | None = None
        self._secret = secret
        self._job = job
        self._software = software
        self._nonce = nonce
        self._way = way
        self._binding = binding
        self._version = 0

    def receive(self, message: bytes) -> Challenge | Proof:
        """Take one message: returns the Challenge that is to be sent, or the client's verified
        Proof, after which the caller sends a Welcome or a Refusal. Raises HandshakeFailed; its
        `refusal`, if there is one, is to be sent before closing."""
        said = _decoded(message)
        if self.state == "hello" and isinstance(said, Hello):
            return self._challenge(said)
        if self.state == "proof" and isinstance(said, Proof):
            return self._verified(said)
        state, self.state = self.state, "closed"
        raise HandshakeFailed("foreign", f"a {type(said).__name__} where the {state} was expected")

    def _challenge(self, hello: Hello) -> Challenge:
        self.state = "closed"
        if (
            hello.tag != TAG
            or len(hello.nonce) != NONCE_BYTES
            or len(hello.session) != SESSION_BYTES
            or hello.oldest > hello.newest
        ):
            raise HandshakeFailed("foreign", "a greeting that is not rallypoint's")
        oldest, newest = VERSIONS
        version = min(newest, hello.newest)
        if version < max(oldest, hello.oldest):
            text = (
                f"the client speaks protocol {_range(hello.oldest, hello.newest)} (rallypoint {hello.software[:40]}), "
                f"the server {_range(oldest, newest)} (rallypoint {self._software})"
            )
            raise HandshakeFailed(
                "version-skew", text, Refusal("version-skew", text, oldest, newest, self._software)
            )
        if hello.job and self._job and hello.job != self._job:
            text = f"this is the store of job {self._job}, not of {hello.job[:80]}"
            raise HandshakeFailed("wrong-job", text, Refusal("wrong-job", text))
        if hello.way not in ("", self._way, self._way.partition(" ")[0]):
            text = f"it connected to {hello.way[:80]}, and its connection arrived at {self._way}: something passes it on"
            raise HandshakeFailed("store-relayed", text, Refusal("store-relayed", text))
        self.state, self.hello, self._version = "proof", hello, version
        nonce, binding = self._nonce, self._binding
        proof = proof_of(self._secret, "server", version, hello, nonce, self._job, binding)
        return Challenge(TAG, version, self._software, self._job, nonce, proof, binding)

    def _verified(self, proof: Proof) -> Proof:
        assert self.hello is not None
        expected = proof_of(
            self._secret, "client", self._version, self.hello, self._nonce, self._job, self._binding
        )
        if not hmac.compare_digest(proof.proof, expected):
            self.state = "closed"
            text = "the client does not know this store's secret"
            raise HandshakeFailed("wrong-secret", text, Refusal("wrong-secret", text))
        self.state = "open"
        return proof


class Joining:
    """The client's side. States: hello → proof → open; any of them → closed."""

    def __init__(
        self,
        secret: bytes,
        job: str,
        software: str,
        *,
        session: bytes,
        nonce: bytes,
        identity: Identity,
        ttl: float,
        resume: bool,
        acked: int,
        orphan: float = inf,
    ) -> None:
        self.state: Literal["hello", "proof", "open", "closed"] = "hello"
        self.hello = Hello(TAG, *VERSIONS, software, job, session, nonce)
        self._secret = secret
        self._rest = (ttl, identity, resume, acked, orphan)

    def start(self, way: str = "") -> bytes:
        """Return the first message to send. `way`: what was connected to."""
        self.hello = msgspec.structs.replace(self.hello, way=way)
        return encode(self.hello)

    def receive(self, message: bytes, binding: bytes = b"") -> bytes | Welcome:
        """Take one message: returns the next one to send, or the Welcome. `binding`: SHA-256 of the
        certificate that was seen here, b"" without TLS. Raises HandshakeFailed."""
        said = _decoded(message)
        if isinstance(said, Refusal) and self.state in ("hello", "proof"):
            early, self.state = self.state == "hello", "closed"
            if said.code not in REFUSALS or (early and said.code in PROVED):
                raise HandshakeFailed(
                    "foreign",
                    f"it refused with {said.code[:40]!r}, which the protocol does not have there",
                )
            raise HandshakeFailed(said.code, said.text, said)  # type: ignore[arg-type]
        if self.state == "hello" and isinstance(said, Challenge):
            return self._prove(said, binding)
        if self.state == "proof" and isinstance(said, Welcome):
            self.state = "open"
            return said
        state, self.state = self.state, "closed"
        raise HandshakeFailed("foreign", f"it answered the {state} with a {type(said).__name__}")

    def _prove(self, challenge: Challenge, binding: bytes) -> bytes:
        self.state = "closed"
        if (
            challenge.tag != TAG
            or len(challenge.nonce) != NONCE_BYTES
            or not VERSIONS[0] <= challenge.version <= VERSIONS[1]
        ):
            raise HandshakeFailed("foreign", "an answer that is not rallypoint's")
        spoken = challenge.version, self.hello, challenge.nonce, challenge.job, challenge.binding
        expected = proof_of(self._secret, "server", *spoken)
        if not hmac.compare_digest(challenge.proof, expected):
            raise HandshakeFailed(
                "wrong-secret", "the server does not know the secret that this client was given"
            )
        if not hmac.compare_digest(challenge.binding, binding):
            raise HandshakeFailed(
                "tls-intercepted",
                "the certificate that arrived here is not the store's: something in between opens the connection",
            )
        self.state = "proof"
        proof = proof_of(self._secret, "client", *spoken)
        return encode(Proof(proof, *self._rest))


def _decoded(message: bytes) -> Hello | Challenge | Proof | Welcome | Refusal:
    try:
        said: Hello | Challenge | Proof | Welcome | Refusal = decode_handshake(message)
    except UNDECODABLE as error:
        raise HandshakeFailed("foreign", f"a message that is not rallypoint's: {error}") from error
    return said


def _range(oldest: int, newest: int) -> str:
    return str(newest) if oldest == newest else f"{oldest} to {newest}"

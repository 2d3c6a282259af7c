"""Certificate of a server of one job: made in memory, and known by its digest alone."""

from __future__ import annotations

import hashlib
import os
import ssl
from typing import NamedTuple

from rallypoint.host import memory_files


class TlsIdentity(NamedTuple):
    """Certificate of a server, with the key that belongs to it inside the context."""

    context: ssl.SSLContext
    binding: bytes  # SHA-256 of the certificate


def new_identity() -> TlsIdentity:
    """Make a P-256 key and a certificate that it signs itself. Needs `cryptography`.

    The key goes into OpenSSL by an anonymous memory file, which is closed before this returns. Names
    and dates in the certificate mean nothing: its digest is all that anybody looks at.
    """
    from datetime import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rallypoint")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1))
        .not_valid_after(datetime(2100, 1, 1))
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # a session is resumed by rallypoint's own handshake
    file = memory_files.create("rallypoint-tls", pem)
    try:
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    der = certificate.public_bytes(serialization.Encoding.DER)
    return TlsIdentity(context, hashlib.sha256(der).digest())


def client_context() -> ssl.SSLContext:
    """Return the settings of a client, which takes any certificate: the proofs cover it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context

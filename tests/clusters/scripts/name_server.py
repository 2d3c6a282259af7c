"""Name server over UDP: addresses of a file, which may change while it runs; it prints its answers.

    python name_server.py FILE     lines of FILE: a name, an address

It does not answer while there is no such file.
"""

import socket
import struct
import sys
from pathlib import Path

A, NO_SUCH_NAME = 1, 3


def name_in(query: bytes) -> tuple[str, int]:
    """The name that a query asks for, and where its type stands (RFC 1035, 4.1.2)."""
    labels, at = [], 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(labels).lower(), at + 1


def answer(query: bytes, known: dict[str, str]) -> tuple[bytes, str]:
    name, at = name_in(query)
    (kind,) = struct.unpack_from("!H", query, at)
    question = query[12 : at + 4]
    found = name in known
    records = b""
    if found and kind == A:
        # the name as a pointer to the question's, class IN, no seconds to keep it
        records = struct.pack("!HHHIH", 0xC00C, A, 1, 0, 4) + socket.inet_aton(known[name])
    flags = 0x8580 | (0 if found else NO_SUCH_NAME)  # an answer, authoritative
    head = query[:2] + struct.pack("!HHHHH", flags, 1, 1 if records else 0, 0, 0)
    return head + question + records, f"{'found' if found else 'NXDOMAIN'} {name}"


def main() -> None:
    zone = Path(sys.argv[1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("", 53))
        print("ready", flush=True)
        while True:
            query, sender = server.recvfrom(512)
            if not zone.exists():
                print(f"no answer {name_in(query)[0]}", flush=True)
                continue
            known = dict(line.split() for line in zone.read_text().splitlines())
            reply, said = answer(query, known)
            server.sendto(reply, sender)
            print(said, flush=True)


main()

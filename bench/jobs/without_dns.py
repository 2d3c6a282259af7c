"""Run a command in a network of its own, where there is no DNS. Needs root. Arguments: `refused` or
`silent`, and the command.

`refused`: whoever asks a name server is refused at once; looking up the name of an address costs
nothing. `silent`: the name server takes the question and says nothing, as in a cluster whose
addresses have no names: every look-up costs the resolver's patience.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
import tempfile

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
NAME_SERVER = "127.0.0.53"

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


checked(libc.unshare(CLONE_NEWNET | CLONE_NEWNS))
checked(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    flags = struct.unpack_from(
        "16sh", fcntl.ioctl(sock, SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
    )[1]
    fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))
with tempfile.NamedTemporaryFile("w", suffix="-resolv.conf") as file:
    file.write(f"nameserver {NAME_SERVER}\n")
    file.flush()
    checked(
        libc.mount(
            file.name.encode(), os.path.realpath("/etc/resolv.conf").encode(), None, MS_BIND, None
        )
    )
if sys.argv[1] == "silent":
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    silent.bind((NAME_SERVER, 53))
    os.set_inheritable(silent.fileno(), True)
os.execvp(sys.argv[2], sys.argv[2:])

"""Strangers at a store's door, until standard input ends. Arguments: host, port, how many
connections to hold open.

They say nothing (half of them), say a byte every now and then (slow loris), or ask for a web page
and come back. What was closed by the server is opened again. Says "here" when all have been there
once.
"""

from __future__ import annotations

import errno
import resource
import select
import socket
import sys
import threading
import time

HELLO = (
    b"\x20\x00\x00\x00" + bytes(8) + b"\x97\x01\xaarallypoint"
)  # how a client begins: the loris knows that much


def dialled(host: str, port: int) -> socket.socket | None:
    sock = socket.socket()
    sock.setblocking(False)
    if sock.connect_ex((host, port)) not in (0, errno.EINPROGRESS):
        sock.close()
        return None
    return sock


class Crowd:
    def __init__(self, host: str, port: int, count: int) -> None:
        self.place, self.count = (host, port), count
        self.socks: dict[int, tuple[socket.socket, int]] = {}  # and how much it has said
        self.epoll = select.epoll()
        self.dialled = self.pages = 0

    def fill(self, most: int) -> None:
        for _ in range(min(most, self.count - len(self.socks))):
            sock = dialled(*self.place)
            if sock is None:
                return
            self.socks[sock.fileno()] = (sock, 0)
            self.epoll.register(sock.fileno(), select.EPOLLIN)
            self.dialled += 1

    def drop_closed(self) -> None:
        for fd, _ in self.epoll.poll(0.0, 4096):
            sock, _ = self.socks.pop(fd)
            sock.close()

    def talk(self) -> None:
        """A loris' next byte; one in ten asks for a page instead."""
        for number, (fd, (sock, said)) in enumerate(list(self.socks.items())):
            if number % 2:
                continue
            try:
                if number % 20:
                    sock.send(HELLO[said % len(HELLO) :][:1])
                else:
                    sock.send(b"GET / HTTP/1.1\r\nHost: store\r\n\r\n")
                    self.pages += 1
            except OSError:
                continue  # not connected yet, or turned away: it is reported as readable
            self.socks[fd] = (sock, said + 1)


def main() -> None:
    host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    crowd, told = Crowd(host, port, count), False
    while not over.is_set():
        crowd.fill(200)
        crowd.talk()
        crowd.drop_closed()
        if crowd.dialled >= count and not told:
            told = True
            print("here", flush=True)
        time.sleep(0.02)
    print(f"{crowd.dialled} connections, {crowd.pages} requests for a page", flush=True)


if __name__ == "__main__":
    main()

"""Try again until it works, without a herd that comes back in step.

    python examples/questions/B5_try_again.py

`time.sleep(5)` in a loop makes every process that failed together try again together, has no end,
and forgets why the others failed. `retry` waits a random while from a range that doubles (full
jitter, as the store's own client), has one deadline for all attempts, and says in the error what
each kind of attempt ended in.
"""

import itertools
import socket
import time

import rallypoint


def main() -> None:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))  # its port is nobody else's, and nobody listens there yet
    began, attempts = time.monotonic(), []

    def connect() -> socket.socket:
        attempts.append(time.monotonic() - began)
        if len(attempts) == 4:
            server.listen()
        return socket.create_connection(server.getsockname(), timeout=5)

    with server, rallypoint.retry(connect, timeout=30) as client:
        assert client.getpeername() == server.getsockname()
    assert len(attempts) == 4
    pauses = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    assert len(set(pauses)) == len(pauses)  # no two alike

    failure = None
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        try:
            rallypoint.retry(
                lambda: socket.create_connection(nobody.getsockname(), timeout=5), timeout=0.5
            )
        except ConnectionRefusedError as error:
            failure = error
    assert failure is not None  # the last attempt's own
    told = failure.__notes__[0]
    assert told.startswith("tried "), told
    assert "x ConnectionRefusedError: " in told
    print(f"it worked at the fourth attempt; where nobody came: {told}")


if __name__ == "__main__":
    main()

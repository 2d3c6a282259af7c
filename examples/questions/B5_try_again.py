"""Try again until it works, without a herd that comes back in step.

    python examples/questions/B5_try_again.py

`time.sleep(5)` in a loop makes every process that failed together try again together, has no end, and forgets why the others failed.
`retry` waits a random while from a range that doubles (full jitter, as the store's own client), has one deadline for all attempts, and
says in the error what each kind of attempt ended in.
"""

import itertools
import socket
import time

import rallypoint


def main() -> None:
    with rallypoint.hold_port() as held:
        port = held.port  # nobody listens there after this

    began, attempts, servers = time.monotonic(), [], []

    def connect() -> socket.socket:
        attempts.append(time.monotonic() - began)
        if len(attempts) == 4:  # somebody begins to listen
            servers.append(socket.create_server(("127.0.0.1", port)))
        return socket.create_connection(("127.0.0.1", port), timeout=5)

    with rallypoint.retry(connect, timeout=30) as client, servers[0]:
        assert client.getpeername()[1] == port
    assert len(attempts) == 4
    pauses = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    assert len(set(pauses)) == len(pauses)  # no two alike

    failure = None
    try:
        rallypoint.retry(lambda: socket.create_connection(("127.0.0.1", port), timeout=5), timeout=0.5)
    except ConnectionRefusedError as error:
        failure = error
    assert failure is not None  # the last attempt's own
    told = failure.__notes__[0]
    assert told.startswith("tried "), told
    assert "x ConnectionRefusedError: " in told
    print(f"it worked at the fourth attempt; where nobody came: {told}")


if __name__ == "__main__":
    main()

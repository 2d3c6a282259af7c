"""How large may a value be, and what happens when it is larger?

    python examples/questions/D5_size_of_the_store.py

TCPStore takes no size; what people give it in that place is the world size, or the port. One value
has at most 8 MiB there, and one byte more ends in "Connection reset by peer" and a client that is
dead from then on. Here the store as a whole has a limit that you choose, and who asks for too much
is told so, with the numbers.
"""

import torch

import rallypoint

MIB = 1 << 20


def refused(store: rallypoint.Store, key: str, size: int) -> rallypoint.LimitExceeded:
    """The error of storing so many bytes."""
    try:
        store[key] = bytes(size)
    except rallypoint.LimitExceeded as error:
        return error
    raise AssertionError(f"{size} bytes were taken")


def main() -> None:
    with (
        rallypoint.serve(max_bytes="64MiB") as server,
        rallypoint.connect(server.address, secret=server.secret) as store,
    ):
        before = torch.randn(5 * MIB)  # float32: 20 MiB
        store["weights"] = before

        large = refused(store, "too large", 100 * MIB)
        assert large.code == "value-too-large"
        assert str(64 * MIB) in str(large), large
        full = refused(store, "too much", 60 * MIB)
        assert full.code == "store-full"
        assert isinstance(full, MemoryError)

        # The connection, and everything else in the store, is unharmed.
        assert store.keys() == ["weights"]
        assert torch.equal(store["weights"], before)
        del store["weights"]
        store["now it fits"] = bytes(60 * MIB)
        assert store.statistics()["reconnects"] == 0
        print(f"20 MiB were stored; 60 MiB more were refused: {str(full).partition(';')[0]}")


if __name__ == "__main__":
    main()

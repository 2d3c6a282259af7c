"""Keep a tensor and a counter in a store, and hand the store to another process.

    python examples/questions/D1_a_tensor_and_a_counter.py

With torch's TCPStore none of these lines exists: a value there is bytes, `store["x"]` is a
TypeError, the store cannot be an argument of a process, and it has no `close`.
"""

import torch
import torch.multiprocessing as mp

import rallypoint

TENSORS = {
    "no dimension": torch.tensor(2.5),
    "no element": torch.empty(0, 3),
    "bfloat16": torch.randn(4, 5).to(torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "not contiguous": torch.arange(12).reshape(3, 4).t(),
}


def work(store: rallypoint.Store) -> None:
    """In another process: the store that was handed over connects there by itself."""
    assert torch.equal(store["my_tensor"], torch.arange(10.0))
    store["my_tensor"] = store["my_tensor"] * 2
    store["counter"] += 1
    store["config"] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "shape": torch.Size([2, 3]),
        "dtype": torch.float16,
    }
    store.close()


def main() -> None:
    with (
        rallypoint.serve() as server,
        rallypoint.connect(server.address, secret=server.secret) as store,
    ):
        store["my_tensor"] = torch.arange(10.0)
        store["counter"] = 41
        process = mp.Process(target=work, args=(store,))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert torch.equal(store["my_tensor"], torch.arange(10.0) * 2)
        assert store["counter"] == 42
        assert store["config"] == {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "shape": torch.Size([2, 3]),
            "dtype": torch.float16,
        }

        for name, tensor in TENSORS.items():
            store[name] = tensor
            found = store[name]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(found, tensor), name
        if torch.cuda.is_available():
            store["on the gpu"] = torch.ones(3, device="cuda")
            assert store["on the gpu"].device.type == "cpu"
            assert store.get("on the gpu", device="cuda").device.type == "cuda"

        assert "nothing" not in store
        assert (
            store.get("nothing", default=None) is None
        )  # at once: TCPStore's get waits for the key
        del store["counter"]
        assert "counter" not in store
        store.close()
        try:
            store["my_tensor"]
        except rallypoint.StoreClosed:
            pass
        else:
            raise AssertionError("a closed store answered")
    print(
        f"a tensor, a counter and {len(TENSORS)} odd tensors went through the store and came back equal"
    )


if __name__ == "__main__":
    main()

"""What goes to a rank and comes back, for real: other processes, descriptors over a socket."""

from __future__ import annotations

import copy
import dataclasses
import enum
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import rallypoint
from rallypoint.errors import RemoteError, RemoteTraceback, UsageError
from rallypoint.launcher.launch.marshalling import payload, unpickling
from rallypoint.launcher.launch.marshalling.payload import Packed

from .ranks import Ranks

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_in_parts")]

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def ranks(torch_in_parts_of_module: None) -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def taken(packed: Packed) -> list[int]:
    """The descriptors, as a receiver has them."""
    fds = [os.dup(fd) for fd in packed.fds]
    packed.close()
    return fds


def returned(value: Any) -> Any:
    return payload.unpack_result(taken(payload.pack_result(value, "fn")))


def called(*args: Any, **kwargs: Any) -> Any:
    """Arguments as they arrive, in this process."""
    with payload.pack_call(print, args, kwargs) as packed:
        fds = [os.dup(fd) for fd in packed.fds]
        _, arrived, named = payload.unpack_call(fds)
    return (*arrived, *named.values())


def raised(error: BaseException) -> BaseException:
    return payload.unpack_error(taken(payload.pack_error(error)))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped() -> int:
    """How many bytes of parcels this process has mapped."""
    lines = [
        line.split()[0]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "rallypoint-payload" in line
    ]
    return sum(
        int(end, 16) - int(first, 16) for first, _, end in (line.partition("-") for line in lines)
    )


def ran(folder: Path, program: str) -> str:
    """What a script says, with the folder of these tests in the place of {tests}."""
    script = folder / "main.py"
    script.write_text(program.format(tests=str(Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False
    )
    return done.stdout + done.stderr


# --- plain values ---

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    layers: list[int] = dataclasses.field(default_factory=lambda: [1, 2])


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        None, True, 10**40, -0.5, "x" * 200_000, b"y" * 3_000_000, bytearray(b"z" * 100_000), [1, [2, (3, {4})]], {"a": frozenset({1})},
        OrderedDict(b=1, a=2), Point(1, 2), Config(), Colour.RED, 3 + 4j, ..., slice(1, 2), range(5), int, Path("/tmp"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_goes_comes_out_equal(ranks: Ranks, value: Any) -> None:
    arrived = ranks.call(lambda given: given, value)
    assert arrived == value
    assert type(arrived) is type(value)


def test_aliases_and_cycles_stay(ranks: Ranks) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    shared = [1, 2]

    def check(loop: Any, a: Any, b: Any, *, c: Any) -> Any:
        assert loop[1] is loop
        assert a is b
        assert b is c
        return [loop, a, b]

    arrived, a, b = ranks.call(check, loop, shared, shared, c=shared)
    assert arrived[1] is arrived
    assert a is b


# --- arrays and tensors ---

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8,
    torch.int64,
    torch.uint16, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


def facts(tensor: Any) -> tuple[Any, ...]:
    """All that there is to a tensor: bit by bit, for any dtype."""
    data = (
        tensor.detach().contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []
    )
    return (
        type(tensor),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.requires_grad,
        data,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_shape_go_and_come_back(ranks: Ranks, dtype: Any) -> None:
    flat = (torch.arange(24) % 2).to(dtype)
    grid = flat.view(2, 3, 4)
    views = [
        flat,
        grid,
        grid.transpose(0, 2),
        grid[:, 1:, ::2],
        flat[3],
        flat[:0],
        flat[5:6],
        flat.expand(3, 24),
    ]
    tensors = [*views, torch.empty(0, 3, dtype=dtype)]
    for one, other in zip(tensors, ranks.call(lambda given: given, tensors), strict=True):
        assert facts(one) == facts(other)


def test_tensors_that_share_memory_still_do(ranks: Ranks) -> None:
    base = torch.arange(1000.0)
    tied = {
        "a": base,
        "b": base[10:20],
        "c": base.view(10, 100).t(),
        "bytes": base.view(torch.uint8)[40:],
    }

    def write(tied: dict[str, Any]) -> Any:
        tied["b"][0] = 77
        assert tied["c"][10, 0] == 77
        return tied

    arrived = ranks.call(write, tied)
    assert arrived["a"][10] == 77
    assert arrived["bytes"][:4].view(torch.float32) == 77
    arrived["a"][11] = 5
    assert arrived["b"][1] == 5
    assert base[10] == 10  # the rank has its own


def test_tied_weights_of_a_model_stay_tied(ranks: Ranks) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)

    def step(model: Any) -> Any:
        assert model[0].weight is model[1].weight
        model(torch.ones(1, 8)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        return model, model.state_dict()

    arrived, state = ranks.call(step, model)
    assert arrived[0].weight is arrived[1].weight
    assert type(arrived[0].weight) is torch.nn.Parameter
    assert not arrived[0].bias.requires_grad
    assert arrived[0].weight.requires_grad
    assert (
        state["0.weight"].data_ptr() == state["1.weight"].data_ptr() == arrived[0].weight.data_ptr()
    )
    assert not torch.equal(arrived[0].weight, model[0].weight)


def test_only_the_part_of_a_storage_that_is_used_is_sent() -> None:
    large = torch.zeros(50_000_000)
    with payload.pack_result(
        [large[1_000_000:1_000_100], large[1_000_050:1_000_200]], "fn"
    ) as packed:
        assert packed.size < 10_000
        one, other = payload.unpack_result([os.dup(fd) for fd in packed.fds])
    one[50] = 3
    assert other[0] == 3
    assert one.shape == (100,)


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:.*quantiz", "ignore:TypedStorage is deprecated"
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(4).to_sparse(), lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.rand(5), 0.1, 3, torch.qint8), lambda: torch.tensor([1 + 2j]).conj(),
        lambda: torch.tensor([1 + 2j]).conj().imag, lambda: torch.empty(3, device="meta"),
    ],
    ids=["coo", "csr", "quantized", "conjugate", "negative", "meta"],
)  # fmt: skip
def test_other_tensors_are_taken_apart_by_torch(ranks: Ranks, make: Any) -> None:
    tensor = make()
    arrived = ranks.call(lambda given: given, tensor)
    assert arrived.layout == tensor.layout
    assert arrived.device == tensor.device
    assert arrived.dtype == tensor.dtype
    if tensor.device.type != "meta":
        plain = [
            one.dequantize() if one.is_quantized else one.to_dense() for one in (arrived, tensor)
        ]
        assert torch.equal(plain[0], plain[1])


class Marked(torch.Tensor):  # type: ignore[misc, name-defined]
    pass


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_subclasses_attributes_and_storages(ranks: Ranks) -> None:
    marked = torch.arange(4.0).as_subclass(Marked)
    marked.source = "a.csv"
    plain = torch.arange(4.0)
    plain.source = "b.csv"

    def give(*given: Any) -> Any:
        return given

    one, other, storage, typed = ranks.call(
        give, marked, plain, plain.untyped_storage(), plain.storage()
    )
    assert type(one).__name__ == "Marked"
    assert (one.source, other.source) == ("a.csv", "b.csv")
    assert storage.tolist() == plain.untyped_storage().tolist()
    assert typed.tolist() == [0, 1, 2, 3]
    assert other.untyped_storage()._cdata == storage._cdata


@pytest.mark.parametrize("size", [10, 100_000, 2_000_000], ids=["inside", "beside", "mapped"])
def test_arrays_are_writable_and_each_ranks_own(ranks: Ranks, size: int) -> None:
    array = np.arange(size, dtype=np.int32)

    def write(array: Any) -> Any:
        array[0] += 1
        return array

    for arrived in ranks.calls(3, write, (array,)):
        assert arrived[0] == 1
        arrived[1] = 9
        assert np.array_equal(arrived[2:], array[2:])
    assert array[0] == 0


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3)), np.array(5.5), np.asfortranarray(np.arange(400_000.0).reshape(4, -1)), np.arange(200_000)[::3],
        np.array(["a", "bc"]),
        np.array([object, None, {"a": 1}], dtype=object), np.zeros(3, dtype=[("x", "f4"), ("y", "i8")]), np.float32(1.5),
        np.array(["2020-01-01"], dtype="M8[D]"),
    ],
    ids=["empty", "0-d", "fortran", "strided", "text", "objects", "records", "scalar", "dates"],
)  # fmt: skip
def test_arrays_of_other_kinds(ranks: Ranks, array: Any) -> None:
    arrived = ranks.call(lambda given: given, array)
    assert type(arrived) is type(array)
    assert arrived.dtype == array.dtype
    assert np.array_equal(arrived, array)


def test_a_large_result_is_not_copied_here_and_lives_as_long_as_somebody_has_it() -> None:
    before, fds = mapped(), descriptors()
    one, other = returned([torch.ones(4 * MIB), np.ones(4 * MIB)])  # 16 and 32 MiB
    assert mapped() - before == 48 * MIB
    assert descriptors() <= fds  # none keeps a descriptor; an earlier test's may go meanwhile
    part = one[5:]
    del one
    gc.collect()
    assert mapped() - before == 48 * MIB
    assert part[0] == 1
    del part
    gc.collect()
    assert mapped() - before == 32 * MIB  # each lives by itself
    view = memoryview(other)
    del other
    gc.collect()
    assert view[0] == 1
    del view
    gc.collect()
    assert mapped() == before


def test_nothing_waits_for_the_collector() -> None:
    gc.disable()
    try:
        before = mapped()
        arrived = returned({"x": torch.ones(2 * MIB), "y": np.ones(2 * MIB)})
        assert mapped() - before == 24 * MIB
        del arrived
        assert mapped() == before
        held = Holder(tensor=torch.ones(3))
        watch = weakref.ref(held)
        called(held)
        returned([held])
        raised(Custom(1, detail=held))  # type: ignore[arg-type]
        del held
        assert watch() is None
    finally:
        gc.enable()


def test_large_buffers_are_aligned() -> None:
    values = [torch.ones(n, dtype=torch.uint8) for n in (100_001, 3, 2 * MIB + 1, 77, 65_537)]
    for tensor in returned([*values, *(tensor[1:] for tensor in values)])[:5]:
        assert tensor.sum() == tensor.numel()
        if tensor.numel() >= unpickling.MAPPED_BYTES:
            assert tensor.data_ptr() % payload.ALIGNMENT == 0


def test_a_parcel_cannot_be_changed_any_more() -> None:
    with payload.pack_result(torch.ones(2 * MIB), "fn") as packed:
        for act in (lambda fd: os.pwrite(fd, b"x", 0), lambda fd: os.ftruncate(fd, 0)):
            with pytest.raises(PermissionError):
                act(packed.fds[0])


def test_nothing_stays_open() -> None:
    before = descriptors()
    for _ in range(3):
        returned([torch.ones(2 * MIB), torch.ones(3)])
        called(torch.ones(3).share_memory_())
        raised(ValueError("x"))
        with pytest.raises(UsageError):
            payload.pack_result([torch.ones(3), threading.Lock()], "fn")
        with pytest.raises(UsageError):
            payload.pack_call(print, (torch.ones(3).share_memory_(), threading.Lock()), {})
    gc.collect()
    assert descriptors() <= before  # what an earlier test left may go meanwhile


# --- memory that stays the same ---


def test_a_shared_tensor_arrives_as_the_same_memory(ranks: Ranks) -> None:
    total = torch.zeros(100).share_memory_()
    part = total[10:20]

    def add(total: Any, part: Any) -> Any:
        total += 1
        part += 10
        return total.is_shared(), total

    for shared, result in ranks.calls(3, add, (total, part)):
        assert shared
        assert not torch.equal(result, torch.zeros(100))
    assert total[0] == 3
    assert total[10] == 33
    assert result[0] == 3
    total += 1
    assert result[0] == 3  # a result is as it was when it was returned


def test_a_shared_model_trains_in_place(ranks: Ranks) -> None:
    model = torch.nn.Linear(4, 2).share_memory()
    before = copy.deepcopy(model.state_dict())

    def step(model: Any) -> None:
        model(torch.ones(1, 4)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad  # an optimizer would import torch._dynamo: 2 s

    ranks.calls(2, step, (model,))
    assert torch.allclose(model.weight, before["weight"] - 0.2)


FILE_SYSTEM = """
import sys
sys.path.insert(0, {tests!r})
import torch
import torch.multiprocessing as mp
from ranks import Ranks

mp.set_sharing_strategy("file_system")
total = torch.zeros(100).share_memory_()
part = total[10:20]
model = torch.nn.Linear(4, 2).share_memory()
before = model.weight.clone()

def work(total, part, model):
    total += 1
    part += 10
    model(torch.ones(1, 4)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad  # an optimizer would import torch._dynamo: 2 s
    return total.is_shared(), model.weight.is_shared()

ranks = Ranks()
assert ranks.calls(2, work, (total, part, model)) == [(True, True)] * 2
ranks.close()
assert total[0] == 2 and total[10] == 22 and total[99] == 2, total
assert torch.allclose(model.weight, before - 0.2)
print("good")
"""


def test_torchs_other_way_of_sharing_arrives_as_the_same_memory_too(tmp_path: Path) -> None:
    """In a process of its own: torch keeps a connection to a helper of its own for good then."""
    output = ran(tmp_path, FILE_SYSTEM)
    assert output == "good\n"


def test_a_closure_and_a_global_of_main_arrive_as_the_same_memory(ranks: Ranks) -> None:
    shared = torch.zeros(3).share_memory_()

    def add() -> None:
        shared.add_(1)
        SHARED.add_(2)

    ranks.calls(2, add)
    assert shared[0] == 2
    assert SHARED[0] == 4


SHARED = torch.zeros(3).share_memory_()


def test_more_shared_tensors_than_a_packet_has_descriptors(ranks: Ranks) -> None:
    tensors = [torch.zeros(1).share_memory_() for _ in range(payload.DESCRIPTORS_MOST + 50)]

    def add(tensors: Any) -> int:
        for number, tensor in enumerate(tensors):
            tensor += number
        return len(tensors)

    with payload.pack_call(add, (tensors,), {}) as packed:
        assert len(packed.fds) == payload.DESCRIPTORS_MOST + 1
        assert ranks.carry_out(packed) == len(tensors)
    assert [int(tensor) for tensor in tensors] == list(range(len(tensors)))


def test_a_mapped_file_arrives_as_the_same_memory(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(8 * 100))
    weights = torch.from_file(str(path), shared=True, size=200, dtype=torch.float32)

    def fill(weights: Any) -> None:
        weights.fill_(2)

    ranks.call(fill, weights[100:])
    assert weights[99] == 0
    assert weights[100] == 2
    path.unlink()
    with pytest.raises(
        UsageError, match=r"args\[0\]: a tensor in shared memory cannot cross as the same memory"
    ):
        payload.pack_call(fill, (weights,), {})


# --- functions ---


def test_lambdas_locals_and_defaults(ranks: Ranks) -> None:
    offset = 5

    def outer(x: int, *, by: int = 3) -> int:
        def inner(y: int) -> int:
            return y * by + offset

        return inner(x)

    assert ranks.call(outer, 2) == 11
    assert ranks.call(lambda: outer(1, by=1)) == 6


def test_classes_of_a_file_that_no_rank_can_import_are_the_same_class_when_they_come_back(
    ranks: Ranks,
) -> None:
    method = Config.__init__
    arrived = ranks.call(lambda: [Config(lr=0.5), Colour.RED, Point(1, 2)])
    assert type(arrived[0]) is Config
    assert arrived[0] == Config(lr=0.5)
    assert arrived[1] is Colour.RED
    assert Config.__init__ is method  # and it was not written to


@dataclasses.dataclass(slots=True)
class Slotted:
    n: int


class Private:
    __slots__ = ("__n",)

    def __init__(self, n: int) -> None:
        self.__n = n

    def n(self) -> int:
        return self.__n


class Named(NamedTuple):
    n: int


def test_classes_with_slots(ranks: Ranks) -> None:
    """They came back as objects with a dict, which their class in the caller has not."""
    slotted, private, named, there = ranks.call(
        lambda: (Slotted(3), Private(4), Named(5), hasattr(Slotted(3), "__dict__"))
    )
    assert (slotted, private.n(), named, there) == (Slotted(3), 4, Named(5), False)


MAIN = '''
import os, sys, socket, dataclasses
sys.path.insert(0, {tests!r})
from ranks import Ranks

COUNT = 0

@dataclasses.dataclass
class Item:
    n: int

class Broken(Exception):
    def __init__(self, code, *, item):
        super().__init__(f"code {{code}}")
        self.code = code
        self.item = item

def bump():
    global COUNT
    COUNT += 1
    return COUNT

def train(start):
    import pickle, sys
    bump()
    bump()
    assert sys.modules["__main__"].COUNT == 2, "one set of globals, found by name"
    item = pickle.loads(pickle.dumps(Item(start)))   # plain pickle finds __main__.Item
    assert type(item) is Item
    return item

def fail():
    raise Broken(7, item=Item(1))

ranks = Ranks()
item = ranks.call(train, 4)
assert type(item) is Item and item == Item(4), item
assert COUNT == 0
try:
    ranks.call(fail)
except Broken as error:
    assert error.code == 7 and type(error.item) is Item and str(error) == "code 7", error
    assert "raise Broken(7, item=Item(1))" in str(error.__cause__), error.__cause__
else:
    raise SystemExit("not raised")
ranks.close()
print("good")
'''  # fmt: skip


@pytest.mark.usefixtures("without_torch")
def test_functions_and_classes_of_main(tmp_path: Path) -> None:
    assert ran(tmp_path, MAIN) == "good\n"


CACHED = """
import functools, sys
sys.path.insert(0, {tests!r})
from ranks import Ranks

@functools.lru_cache(maxsize=7)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

class Model:
    @functools.cached_property
    def width(self):
        return fib(10)

    @functools.cache
    def depth(self):
        return 3

def train(model):
    return model.width, "width" in vars(model), model.depth(), fib.cache_info()

ranks = Ranks()
got = ranks.call(train, Model())
assert got[:3] == (55, True, 3) and got[3].maxsize == 7 and got[3].hits == 8, got
assert ranks.call(fib, 20) == 6765
ranks.close()
print("good")
"""


@pytest.mark.usefixtures("without_torch")
def test_cached_functions_and_properties_of_main(tmp_path: Path) -> None:
    assert ran(tmp_path, CACHED) == "good\n"


def test_functions_of_modules_go_by_name_and_are_imported_there(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parcel_here.py").write_text(
        "import os\nLOADED_IN = os.getpid()\ndef where():\n    return LOADED_IN, os.getpid()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import parcel_here  # type: ignore[import-not-found]

    loaded, ran = ranks.call(parcel_here.where)
    assert loaded == ran != os.getpid()
    monkeypatch.setattr(sys, "path", sys.path[1:])  # now no rank finds it, and it goes by value
    loaded, ran = ranks.call(parcel_here.where)
    assert loaded == os.getpid() != ran


def test_a_shared_tensor_of_an_imported_module_is_the_same_memory_in_the_rank(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parcel_state.py").write_text(
        "import torch\ntotal = torch.zeros(2).share_memory_()\n"
    )
    (tmp_path / "parcel_train.py").write_text(
        "import parcel_state\ndef train():\n    parcel_state.total += 1\n    return parcel_state.total.is_shared()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import parcel_state  # type: ignore[import-not-found]
    import parcel_train  # type: ignore[import-not-found]

    assert ranks.calls(2, parcel_train.train) == [True, True]
    assert parcel_state.total[0] == 2


def test_our_shared_tensor_arrives_as_the_same_memory_and_comes_back_as_the_same_object(
    ranks: Ranks,
) -> None:
    shared = rallypoint.SharedTensor((3,), torch.float64)

    def add(shared: Any) -> Any:
        with shared.locked():
            shared.tensor.add_(1)
        return shared

    assert ranks.calls(3, add, (shared,)) == [shared] * 3
    assert shared.tensor[0] == 3

    def add_plainly(tensor: Any) -> None:
        tensor += 1

    ranks.call(add_plainly, shared.tensor)
    assert shared.tensor[0] == 4


def test_a_store_reconnects_where_it_arrives(ranks: Ranks) -> None:
    with (
        rallypoint.serve() as server,
        rallypoint.connect(server.address, secret=server.secret) as store,
    ):

        def write(store: Any) -> str:
            store["from"] = os.getpid()
            return repr(store)

        assert "connected" in ranks.call(write, store)
        assert store["from"] != os.getpid()
        with pytest.raises(TypeError, match="only on its way into a new process"):
            pickle.dumps(store)


def test_a_module_that_fails_in_the_rank_says_where_it_was_needed(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"import os\nif os.getpid() != {os.getpid()}:\n    raise OSError('not here')\ndef run():\n    pass\n"
    (tmp_path / "parcel_once.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    import parcel_once  # type: ignore[import-not-found]

    with pytest.raises(OSError, match="not here") as caught:
        ranks.call(parcel_once.run)
    assert caught.value.__notes__ == [
        "rallypoint: this was raised while the function and its arguments were unpacked in the rank"
    ]


@pytest.mark.gpu
def test_tensors_of_an_accelerator_come_back_on_the_cpu_and_do_not_go(ranks: Ranks) -> None:
    def work() -> Any:
        base = torch.arange(1000.0, device="cuda")
        model = torch.nn.Linear(3, 3, device="cuda")
        return (
            base,
            base[10:20],
            model,
            torch.eye(3, device="cuda").to_sparse(),
            torch.ones(0, device="cuda"),
            {"state": model.state_dict()},
        )

    base, part, model, sparse, empty, state = ranks.call(work)
    assert {
        one.device.type
        for one in (base, part, model.weight, sparse, empty, state["state"]["weight"])
    } == {"cpu"}
    assert torch.equal(base, torch.arange(1000.0))
    base[10] = -1
    assert part[0] == -1
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    assert type(model.weight) is torch.nn.Parameter
    with pytest.raises(UsageError) as caught:
        payload.pack_call(print, ([torch.ones(2, device="cuda")],), {})
    assert caught.value.code == "launch-argument"
    assert str(caught.value) == "args[0][0]: a tensor on an accelerator cannot cross"


# --- results that cannot be sent ---


class Holder:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


def iter_of_nothing() -> Iterator[int]:
    yield from ()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"model": Holder(lock=threading.Lock())}, 'result["model"].lock: a threading.Lock does not guard anything between processes'),
        ([1, iter_of_nothing()], "result[1]: a generator cannot be copied: it stands in the middle of a function"),
        (torch.ones(2, requires_grad=True).sum(),
         "result: a tensor with a graph behind it cannot cross: requires_grad is set and it was computed from others, and autograd "
         "does not reach into another process"),
        (Holder(a=[Holder(b=sys._getframe())]),
         "result.a[0].b: a frame cannot cross into another process: TypeError: cannot pickle 'frame' object"),
    ],
    ids=["lock", "generator", "graph", "frame"],
)  # fmt: skip
def test_what_cannot_come_back_is_named(value: Any, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        payload.pack_result(value, "fn")
    assert str(caught.value) == f"what fn returned cannot be sent back: {text}"


def test_a_result_that_says_how_it_is_pickled_is_taken_at_its_word() -> None:
    class Careful:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.n = 5

        def __getstate__(self) -> dict[str, int]:
            return {"n": self.n}

    assert returned(Careful()).n == 5


def test_the_search_for_what_cannot_go_passes_over_plain_data_quickly() -> None:
    value = {
        "numbers": list(range(3_000_000)),
        "text": ["x"] * 1_000_000,
        "tensor": torch.ones(MIB),
        "bad": threading.Lock(),
    }
    with pytest.raises(UsageError, match=r'cannot be sent back: result\["bad"\]: a threading.Lock'):
        payload.pack_result(value, "fn")


def test_a_result_nested_too_deep_is_named() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UsageError, match="recursion"):
        payload.pack_result(deep, "fn")
    while deep:
        deep = deep[0]


def test_a_result_whose_class_is_only_there(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "parcel_only_there.py").write_text("class Thing:\n    pass\n")

    def make(folder: str) -> Any:
        sys.path.insert(0, folder)
        import parcel_only_there  # type: ignore[import-not-found]

        return parcel_only_there.Thing()

    with pytest.raises(
        UsageError,
        match="cannot be read here: ModuleNotFoundError: No module named 'parcel_only_there'",
    ) as caught:
        ranks.call(make, str(tmp_path))
    assert caught.value.code == "result-unsupported"


# --- exceptions ---


class Custom(Exception):
    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.detail = detail


class Reduced(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a)
        self.b = b

    def __reduce__(self) -> Any:
        return Reduced, (self.args[0], self.b)


class Liar(Exception):
    def __reduce__(self) -> Any:
        return int, ("7",)


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An exception whose class lets nobody set an attribute, `__cause__` neither."""

    step: int


def failing(depth: int) -> None:
    if depth:
        failing(depth - 1)
    try:
        raise KeyError("inner")
    except KeyError as inner:
        error = Custom(3, detail="d")
        error.add_note("a note")
        raise error from inner


def test_an_exception_arrives_with_all_that_it_has(ranks: Ranks) -> None:
    with pytest.raises(Custom, match="code 3") as caught:
        ranks.call(failing, 2)
    error = caught.value
    assert (error.code, error.detail, error.args, error.__notes__) == (
        3,
        "d",
        ("code 3",),
        ["a note"],
    )
    assert isinstance(error.__context__, KeyError)
    remote = error.__cause__
    assert isinstance(remote, RemoteTraceback)
    assert 'raise KeyError("inner")' in remote.text
    assert "direct cause" in remote.text
    assert remote.text.count("in failing") == 4
    assert "in unpack_call" not in remote.text


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x", 1), KeyError("k"), OSError(2, "No such file", "a.txt"), FileNotFoundError(2, "No such file", "a", None, "b"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), StopIteration(5), SystemExit(3), KeyboardInterrupt(), Reduced(1, 2),
        ImportError("m", name="n", path="p"), SyntaxError("bad", ("f.py", 1, 2, "x =")), torch.cuda.OutOfMemoryError("CUDA out of memory"),
        rallypoint.errors.StoreTimeout("wait-timeout", "too late", outcome="unknown", why=("slow",)),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_exceptions_of_every_kind_keep_type_arguments_and_attributes(error: BaseException) -> None:
    arrived = raised(error)
    assert type(arrived) is type(error)
    assert arrived.args == error.args
    assert str(arrived) == str(error)
    for name in (
        "errno",
        "filename",
        "filename2",
        "value",
        "code",
        "name",
        "path",
        "start",
        "reason",
        "lineno",
        "text",
        "b",
        "why",
        "outcome",
    ):
        if hasattr(error, name):
            assert getattr(arrived, name) == getattr(error, name), name


def test_what_an_exception_holds_and_cannot_send_is_left_out_and_noted() -> None:
    error = Custom(1, detail="d")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    error.__cause__ = ValueError(threading.Lock(), "second")
    arrived: Any = raised(error)
    assert arrived.args == ("code 1",)
    assert not hasattr(arrived, "lock")
    assert arrived.__notes__ == [
        "rallypoint: its attributes were left out, because they cannot be sent: a threading.Lock"
    ]
    cause = arrived.__context__
    assert type(cause) is ValueError
    assert cause.args == (str(error.__cause__),)
    assert cause.__notes__ == [
        "rallypoint: its attributes were left out, because they cannot be sent: a threading.Lock"
    ]


def test_a_group_arrives_with_its_members() -> None:
    group = ExceptionGroup("two", [ValueError(1), ExceptionGroup("inner", [Custom(2, detail="d")])])
    arrived: Any = raised(group)
    assert isinstance(arrived, ExceptionGroup)
    assert arrived.message == "two"
    assert isinstance(arrived.exceptions[0], ValueError)
    inner: Any = arrived.exceptions[1]
    assert inner.exceptions[0].detail == "d"


def test_an_exception_whose_class_cannot_be_had_here(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "parcel_errors.py").write_text("class Own(Exception):\n    pass\n")

    def fail(folder: str) -> None:
        sys.path.insert(0, folder)
        import parcel_errors  # type: ignore[import-not-found]

        error = parcel_errors.Own("lost")
        error.add_note("why")
        raise error

    with pytest.raises(RemoteError) as caught:
        ranks.call(fail, str(tmp_path))
    assert caught.value.type_name == "parcel_errors.Own"
    assert str(caught.value) == "parcel_errors.Own: lost"
    assert caught.value.__notes__[0] == "why"
    assert "raise error" in str(caught.value.__cause__)


def test_an_exception_that_lets_nobody_set_its_attributes() -> None:
    error = Frozen(3)
    error.__dict__["__notes__"] = ["a note"]
    arrived: Any = raised(error)
    assert (type(arrived), arrived.step, arrived.__notes__) == (Frozen, 3, ["a note"])
    assert isinstance(arrived.__cause__, RemoteTraceback)


@pytest.mark.parametrize("error", [Liar("x"), Rude("y")], ids=["liar", "rude"])
def test_exceptions_that_do_not_behave(error: BaseException) -> None:
    arrived = raised(error)
    assert isinstance(arrived, RemoteError | Rude)
    assert isinstance(arrived.__cause__, RemoteTraceback)


def test_an_exception_is_bounded() -> None:
    error = ValueError("x" * 40_000_000)
    error.batch = torch.ones(20_000_000)  # type: ignore[attr-defined]
    before: BaseException = error
    for _ in range(3000):
        following = ValueError("again")
        following.__context__ = before
        before = following
    with payload.pack_error(before) as packed:
        assert packed.size < 4 * MIB
        assert isinstance(payload.unpack_error([os.dup(fd) for fd in packed.fds]), ValueError)
    with payload.pack_error(error) as packed:
        assert packed.size < 4 * MIB
        arrived = payload.unpack_error([os.dup(fd) for fd in packed.fds])
    assert "bytes are more than" in "".join(arrived.__notes__)


def test_a_cycle_of_causes_ends() -> None:
    one, other = ValueError(1), KeyError(2)
    one.__context__, other.__context__ = other, one
    assert isinstance(raised(one).__context__, KeyError)


def test_a_parcel_that_is_none_is_an_error_all_the_same() -> None:
    fd = os.memfd_create("x")
    os.write(fd, b"x" * 100)
    arrived = payload.unpack_error([fd])
    assert isinstance(arrived, RemoteError)

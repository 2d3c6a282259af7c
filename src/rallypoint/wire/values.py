"""Values and their bytes; tensors travel as raw buffers.

A value is None, a bool, an int of any size, a float, a complex, a str, bytes; a list, tuple, set,
frozenset, dict, OrderedDict or Counter of values (keys are int, str or bool); a `torch.Tensor` or
`Parameter`, which comes back as a tensor; a numpy array or scalar; a `torch.Size`, `torch.dtype` or
`torch.device`. Nothing else, and no subclass of these, because what goes in comes out equal and of
the same type. With `allow_pickle` the rest is pickled, and read by whoever allows that too.

What comes back is a copy: it shares no memory with what went in, tensors have no gradient and are
on the CPU or the device that was asked for, arrays are in C order, and a tensor that occurs twice
in a value (tied weights) is two tensors afterwards.

The bytes. None, bool, int of 64 bits, float, str and bytes are the bare msgpack scalar. All else
begins with a byte that msgpack never uses, followed by the version of this format, the length of a
tree, the tree, and the memory of the tensors and arrays in the order in which the tree names them,
each at the next offset that is a multiple of `ALIGNMENT`. So no offset is written down that could
be wrong. A node of the tree is a scalar or an array whose first element says what it is (the
constants `_LIST` to `_PICKLE`). Memory is little-endian, as on every machine that torch is built
for on Linux, except where a numpy dtype says otherwise.

Equal values have equal bytes, which is what `compare_and_set` compares, and a value that was read
has the bytes that were written. "Equal" is meant strictly: 1, 1.0 and True differ, so do 0.0 and
-0.0, a list and a tuple, float32 and float64, and dicts in another order; a NaN equals itself. Not
covered: what was pickled.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import shlex
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, Final, NamedTuple

import msgspec

from rallypoint.errors import ValueUnsupported
from rallypoint.wire.messages import INLINE_BYTES

MAX_DEPTH = 100
"""Containers inside containers: more than any configuration has, and few enough that no reader runs
out of stack (1000 frames)."""

MAX_DIMENSIONS = 64
"""Dimensions of a tensor or array: what numpy allows, and beyond what torch's own operations
take."""

ALIGNMENT = 64
"""Bytes. A cache line and the widest vector register: what torch's own allocator gives."""

BYTES_IN_TREE = 4096
"""Longer bytes are a buffer behind the tree: they are sent from where they are, and a copy of this
length costs nothing."""

GATHER_BYTES = 4096
"""Shorter buffers are copied together: cheaper than a place of their own in the list that the
kernel is given (at most 1024)."""

_MARK = 0xC1
_VERSION = 1
_HEAD = struct.Struct("<BBxxI")  # mark, version, length of the tree
_INT64 = 1 << 63
_MSGPACK_BYTES = 1 << 32  # a str or bytes of msgpack is shorter

# What a node is. Never renumbered: a server keeps values longer than a client lives.
_LIST, _TUPLE, _SET, _FROZENSET, _DICT, _ORDERED = range(6)
(
    _INT,
    _TEXT,
    _BYTES,
    _TENSOR,
    _ARRAY,
    _NUMBER,
    _NUMPY_STR,
    _NUMPY_BYTES,
    _SIZE,
    _DTYPE,
    _DEVICE,
    _PICKLE,
) = range(6, 18)
_COMPLEX, _COUNTER = 18, 19

_PLAIN = frozenset({type(None), bool, int, float, str})  # in a tree as they are
_LEAVES = _PLAIN | {bytes}
_KEYS = frozenset({int, str, bool})
_Node = list[object]

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode

# The name of a numpy dtype whose bytes are all there is to it. Nothing wider may reach numpy:
# dtype("M8[0s]") divides by zero, and that ends the process.
_RAW_DTYPE = re.compile(
    r"[<>|][biufcSUV][1-9]\d{0,9}|[<>][mM]8(?:\[(?:[1-9]\d{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?",
    re.ASCII,
)
_RAW_KINDS = "biufcmMSUV"


class _Absent:
    """The only instance, `ABSENT`, stands for "there is no such key", and is itself no value."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()


class TooLarge(Exception):
    """Refusal to copy more than the limit of `encode`: at least `size` bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(f"a value of at least {size} bytes")
        self.size = size


class Parts(NamedTuple):
    """A large encoded value that was not copied: its bytes are those of `buffers`, one after the
    other.

    Each buffer is a contiguous memoryview of bytes and keeps its memory alive. There may be more of
    them than one system call takes (1024). Until they are sent, nobody should write to the tensors
    that were encoded.
    """

    buffers: tuple[memoryview, ...]
    size: int


def size_of(encoded: bytes | Parts) -> int:
    """Return how many bytes an encoded value has."""
    return encoded.size if isinstance(encoded, Parts) else len(encoded)


def join(encoded: bytes | Parts) -> bytes:
    """Return an encoded value in one piece; copies when it was not."""
    return b"".join(encoded.buffers) if isinstance(encoded, Parts) else encoded


def alloc(size: int) -> memoryview:
    """Return `size` bytes of writable memory, to receive a large value into; what is in it is
    undefined, and tensors may live in it.

    Not a bytearray where numpy is loaded: that writes zeros to all of it while holding the GIL
    (25 ms for 64 MiB where numpy took 4). numpy's allocator reuses memory that was freed before and
    asks for huge pages.
    """
    if (numpy := _loaded("numpy", "empty", "uint8")) is None:
        return memoryview(bytearray(size))
    memory = numpy.empty(size + ALIGNMENT, numpy.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memoryview(memory)[start : start + size]


def encode(value: object, *, allow_pickle: bool = False, limit: int | None = None) -> bytes | Parts:
    """Return the bytes of a value: `bytes` up to `INLINE_BYTES`, above that `Parts`, in which
    tensors, arrays and bytes are not copied (they are made contiguous in host memory if they are
    not).

    Raises ValueUnsupported (`value-unsupported`) with the path of what is no value; then nothing of
    it was encoded. With `allow_pickle` such a part is pickled, and the error is only for what
    cannot be pickled either. Raises TooLarge instead of copying tensors and arrays of more than
    `limit` bytes in all; what need not be copied is for the caller to weigh.
    """
    kind = type(value)
    if kind is bytes and INLINE_BYTES < len(value) < _MSGPACK_BYTES:  # type: ignore[arg-type]
        head = struct.pack(">BI", 0xC6, len(value))  # type: ignore[arg-type]
        return Parts((memoryview(head), memoryview(value)), len(head) + len(value))  # type: ignore[arg-type]
    if kind in _LEAVES:
        try:
            encoded = _pack(value)
        except (OverflowError, ValueError):
            pass  # msgpack has no form for it: a node of a tree has
        else:
            if kind is not int or value < _INT64:  # type: ignore[operator]
                return _in_parts(encoded)
    writer = _ValueWriter(allow_pickle, limit)
    try:
        tree = _pack(writer.node(value, 0))
    except _Refused as refused:
        raise refused.error() from refused.__cause__
    if len(tree) >= 1 << 32:  # its length has 4 bytes
        text = "value: more than 4 GiB beside its tensors, arrays and bytes"
        raise ValueUnsupported("value-unsupported", text)
    return _laid_out(_HEAD.pack(_MARK, _VERSION, len(tree)) + tree, writer.buffers)


def _in_parts(encoded: bytes) -> bytes | Parts:
    return encoded if len(encoded) <= INLINE_BYTES else Parts((memoryview(encoded),), len(encoded))


def decode(
    data: bytes | bytearray | memoryview, *, allow_pickle: bool = False, device: Any = None
) -> object:
    """Return the value whose bytes `data` is. `data` is a contiguous buffer of bytes.

    From a writable buffer, which must belong to the caller alone, nothing is copied: tensors and
    arrays are views of it, and one of them keeps all of it alive. From `bytes` each gets memory of
    its own. Tensors go to `device` (as `torch.Tensor.to` takes it, and with the errors that has)
    when it is given, and to the CPU otherwise. torch and numpy are imported if a value has need of
    them and not before.

    Raises ValueUnsupported: `value-malformed` when these are not the bytes of a value, which is
    found out before memory is allocated for what they announce; `value-unsupported` when the value
    cannot be had here: torch or numpy is not installed, or it was pickled and `allow_pickle` is not
    set. With `allow_pickle`, who wrote the value can run any code here.
    """
    try:
        if data[0] != _MARK:
            scalar = _unpack(data)
            if type(scalar) in _LEAVES:
                return scalar
            raise _malformed(f"a bare {type(scalar).__name__}")
        _, version, length = _HEAD.unpack_from(data)
        if version != _VERSION:
            raise _malformed(
                f"its format has version {version}, this rallypoint reads version {_VERSION}"
            )
        view = memoryview(data)
        start = _HEAD.size + length
        if start > len(view):
            raise _malformed(f"its tree has {length} bytes and {len(view) - _HEAD.size} are there")
        tree = _unpack(view[_HEAD.size : start])
    except (IndexError, struct.error):
        raise _malformed("it ends too early") from None
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
    ) as error:  # the latter is no DecodeError: text that is not UTF-8
        raise _malformed(str(error)) from None
    except RecursionError:
        raise _malformed("it is nested too deep") from None
    reader = _ValueReader(view, start, allow_pickle, device)
    value = reader.value(tree, 0)
    if reader.at != len(view):
        raise _malformed(f"{len(view) - reader.at} bytes follow it")
    return value


# --- writing ---


class _Refused(Exception):
    """Refusal of something that is no value. On its way out it collects its path, innermost first."""

    def __init__(self, what: str, *help: tuple[str, str]) -> None:
        super().__init__(what)
        self.what = what
        self.help = help
        self.pieces: list[str] = []

    def error(self) -> ValueUnsupported:
        pieces = self.pieces[::-1]
        path = "value" + "".join(
            pieces if len(pieces) <= 12 else [*pieces[:6], " ... ", *pieces[-6:]]
        )
        help = tuple((sentence, command.replace("{}", path)) for sentence, command in self.help)
        return ValueUnsupported("value-unsupported", f"{path}: {self.what}", help=help)


def _laid_out(head: bytes, buffers: list[memoryview]) -> bytes | Parts:
    """Head and buffers with the padding between them; in one piece if it is small, otherwise only
    what is short is copied."""
    size = len(head)
    pieces: list[bytes | memoryview] = [head]
    for buffer in buffers:
        if padding := -size % ALIGNMENT:
            pieces.append(b"\0" * padding)
        pieces.append(buffer)
        size += padding + len(buffer)
    if size <= INLINE_BYTES:
        return b"".join(pieces)
    gathered: list[memoryview] = []
    for are_short, run in groupby(pieces, lambda piece: len(piece) < GATHER_BYTES):
        same = list(run)
        gathered += map(memoryview, [b"".join(same)] if are_short else same)
    return Parts(tuple(gathered), size)


class _ValueWriter:
    """Builds the tree of a value and collects its buffers."""

    __slots__ = ("allow_pickle", "buffers", "copied", "hashed", "limit")

    def __init__(
        self, allow_pickle: bool, limit: int | None = None, *, hashed: bool = False
    ) -> None:
        self.allow_pickle = allow_pickle
        self.limit = limit
        self.copied = 0  # bytes
        self.hashed = hashed  # inside a set
        self.buffers: list[memoryview] = []

    def node(self, value: object, depth: int) -> object:
        """Return the node of a value that is inside `depth` containers."""
        kind = type(value)
        write = _WRITE.get(kind) or _learned(kind)
        if write is None:
            return self.refuse(value, *_why_not(value))
        return write(self, value, depth)

    def inside(self, value: object, depth: int, piece: str, key: object = None) -> object:
        """Return the node of a value that its container has at `piece`, a format for `key`."""
        try:
            return self.node(value, depth + 1)
        except _Refused as refused:
            refused.pieces.append(piece.format(shown(key)))
            raise

    def buffer(self, memory: memoryview) -> None:
        if len(memory):
            self.buffers.append(memory)

    def copy(self, size: int) -> None:
        """Count bytes that are about to be copied: an expanded tensor of four bytes may show
        terabytes."""
        self.copied += size
        if self.limit is not None and self.copied > self.limit:
            raise TooLarge(self.copied)

    def refuse(self, value: object, what: str, *help: tuple[str, str]) -> object:
        if self.allow_pickle:
            return self.pickled(value)
        raise _Refused(
            f"{what} cannot be stored",
            *help,
            ("or let this client pickle it", "rallypoint.connect(..., allow_pickle=True)"),
        )

    def plain(self, value: object, depth: int) -> object:
        return value

    def absent(self, value: object, depth: int) -> object:
        """Refuse it, also with pickle: it would come back as another object, and is looked for by
        identity."""
        raise _Refused(
            'ABSENT stands for "no such key" and cannot be stored',
            ("to have no such key, remove it", "store.delete(key)"),
        )

    def int_(self, value: int, depth: int) -> object:
        if -_INT64 <= value < 2 * _INT64:
            return value
        return [_INT, value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)]

    def str_(self, value: str, depth: int) -> object:
        data = value.encode("utf-8", "surrogatepass")
        if len(data) < _MSGPACK_BYTES and value.isascii():
            return value
        try:
            _pack(value)
        except ValueError:  # lone surrogates, or more than 4 GiB
            self.buffer(memoryview(data))
            return [_TEXT, len(data)]
        return value

    def bytes_(self, value: bytes, depth: int) -> object:
        if len(value) <= BYTES_IN_TREE:
            return value
        self.buffer(memoryview(value))
        return [_BYTES, len(value)]

    def plain_nodes(self, values: Iterable[object], depth: int) -> bool:
        """Tell whether msgpack has a form for all these values: then they are their own nodes."""
        if depth >= MAX_DEPTH:
            text = f"containers nested more than {MAX_DEPTH} deep, or inside themselves, cannot be stored"
            raise _Refused(text, ("keep it flatter, or in several keys", ""))
        if not _PLAIN.issuperset(map(type, values)):
            return False
        try:
            _pack(values)
        except (OverflowError, ValueError):
            return False
        return True

    def sequence(self, tag: int, value: list[object] | tuple[object, ...], depth: int) -> object:
        if self.plain_nodes(value, depth):
            return [tag, *value]
        return [tag, *(self.inside(item, depth, "[{}]", at) for at, item in enumerate(value))]

    def elements(self, tag: int, value: Iterable[object], depth: int) -> object:
        """Return a set's elements in the order of their bytes, because its own order differs from
        process to process."""
        found = []
        self.plain_nodes((), depth)
        for element in value:
            apart = _ValueWriter(self.allow_pickle, hashed=True)
            node = apart.inside(element, depth, "{{...}}")
            found.append((_pack(node) + b"".join(apart.buffers), node, apart.buffers))
        found.sort(key=lambda each: each[0])
        for _, _, buffers in found:
            self.buffers += buffers
        return [tag, *(node for _, node, _ in found)]

    def ordered(self, value: OrderedDict[object, object], depth: int) -> object:
        """With `_metadata`, which `Module.state_dict()` hangs on it and `load_state_dict` reads."""
        head: _Node = [_ORDERED, None]
        if "_metadata" in (attributes := vars(value)):
            head[1] = self.inside(attributes["_metadata"], depth, "._metadata")
        return self.without_attributes(head, value, depth)

    def without_attributes(self, head: _Node, value: Any, depth: int) -> object:
        others = [name for name in vars(value) if head[0] != _ORDERED or name != "_metadata"]
        if others:
            what = f"{article(type(value).__name__)} with an attribute {others[0]!r}"
            return self.refuse(value, what, ("make it a dict", "dict({})"))
        return self.items(head, value, depth)

    def items(self, head: _Node, value: dict[object, object], depth: int) -> object:
        if not _KEYS.issuperset(map(type, value)):
            key = next(key for key in value if type(key) not in _KEYS)
            what = f"a dict with the key {shown(key)} ({_name(type(key))}; int, str and bool are possible)"
            return self.refuse(value, what, ("make it a str", f"str({shown(key)})"))
        plain = self.plain_nodes(list(value), depth)
        nodes = [*head, *(value if plain else [self.node(key, depth + 1) for key in value])]
        if self.plain_nodes(list(value.values()), depth):
            return [*nodes, *value.values()]
        return [*nodes, *(self.inside(value[key], depth, "[{}]", key) for key in value)]

    def tensor(self, value: Any, depth: int) -> object:
        if reason := _unsuited(value):
            return self.refuse(value, *reason)
        if self.hashed:
            return self.refuse(
                value,
                "a tensor in a set (it is equal to nothing but itself)",
                ("use a list or a tuple", ""),
            )
        if not (
            value.is_cpu and value.is_contiguous() and not value.is_conj() and not value.is_neg()
        ):
            self.copy(value.nbytes)
            value = _settled(value)
        if size := value.nbytes:
            try:
                memory = _memory(value, size)
            except RuntimeError as error:  # inside vmap or grad a tensor is a placeholder
                return self.refuse(
                    value, f"a tensor without memory of its own ({error})".replace("\n", " ")
                )
            self.buffers.append(memory)
        return [_TENSOR, str(value.dtype)[6:], *value.shape]  # "torch.float32"

    def array(self, value: Any, depth: int) -> object:
        name = _array_dtype(value.dtype)
        if name is None or not _shape_fits(value.shape, value.dtype.itemsize):
            return self.refuse(value, *_why_not_array(value))
        if not value.flags.c_contiguous:
            self.copy(value.nbytes)
            value = value.copy(order="C")
        self.buffer(
            memoryview(value.reshape(-1).view("u1"))
        )  # datetimes have no buffer of their own
        return [_ARRAY, name, *value.shape]

    def number(self, value: Any, depth: int) -> object:
        name = _array_dtype(value.dtype)
        if name is None:
            return self.refuse(value, *_why_not_array(value))
        return [_NUMBER, name, value.tobytes()]

    def numpy_str(self, value: Any, depth: int) -> object:
        return [
            _NUMPY_STR,
            self.str_(str.__str__(value), depth),
        ]  # str() would drop zeros at the end

    def numpy_bytes(self, value: Any, depth: int) -> object:
        return [_NUMPY_BYTES, self.bytes_(bytes(value), depth)]

    def pickled(self, value: object) -> object:
        import pickle

        try:
            data = pickle.dumps(value, protocol=5)
        except Exception as error:  # whatever __reduce__ of somebody's class raises
            name = article(_name(type(value)))
            raise _Refused(f"{name} cannot be pickled ({type(error).__name__}: {error})") from error
        self.buffer(memoryview(data))
        return [_PICKLE, len(data)]


_WRITE: dict[type, Callable[[_ValueWriter, Any, int], object]] = {
    type(None): _ValueWriter.plain,
    bool: _ValueWriter.plain,
    int: _ValueWriter.int_,
    float: _ValueWriter.plain,
    str: _ValueWriter.str_,
    bytes: _ValueWriter.bytes_,
    list: lambda writer, value, depth: writer.sequence(_LIST, value, depth),
    tuple: lambda writer, value, depth: writer.sequence(_TUPLE, value, depth),
    set: lambda writer, value, depth: writer.elements(_SET, value, depth),
    frozenset: lambda writer, value, depth: writer.elements(_FROZENSET, value, depth),
    dict: lambda writer, value, depth: writer.items([_DICT], value, depth),
    OrderedDict: _ValueWriter.ordered,
    Counter: lambda writer, value, depth: writer.without_attributes([_COUNTER], value, depth),
    complex: lambda writer, value, depth: [_COMPLEX, value.real, value.imag],
    _Absent: _ValueWriter.absent,
}
"""Writer of each type; those of torch and numpy are added when a value of theirs comes."""


def _learned(kind: type) -> Callable[[_ValueWriter, Any, int], object] | None:
    """Return the writer for a type of torch or numpy, which is remembered. If there is such a
    value, its module is loaded already."""
    found: dict[Any, Callable[[_ValueWriter, Any, int], object]] = {}
    if (torch := _loaded("torch", "Tensor", "nn")) is not None:
        found = {
            torch.Tensor: _ValueWriter.tensor,
            torch.nn.Parameter: _ValueWriter.tensor,
            torch.Size: lambda writer, value, depth: [_SIZE, *value],
            torch.dtype: lambda writer, value, depth: [_DTYPE, str(value)[6:]],
            torch.device: lambda writer, value, depth: [_DEVICE, value.type, value.index],
        }
    if (numpy := _loaded("numpy", "ndarray")) is not None:
        found |= {
            numpy.ndarray: _ValueWriter.array,
            numpy.str_: _ValueWriter.numpy_str,
            numpy.bytes_: _ValueWriter.numpy_bytes,
        }
        if issubclass(kind, numpy.generic) and kind.__module__ == "numpy":
            found.setdefault(kind, _ValueWriter.number)
    if kind in found:
        _WRITE[kind] = found[kind]
    return found.get(kind)


def _loaded(name: str, *has: str) -> Any:
    """Return the module if it is there, and so far with importing that it has these names."""
    module = sys.modules.get(name)
    return module if module is not None and all(hasattr(module, each) for each in has) else None


def _memory(tensor: Any, size: int) -> memoryview:
    """Return the memory of a contiguous CPU tensor, which it keeps alive.

    Not `tensor.numpy()`: that forbids the user's tensor to be resized ever after, takes five times
    as long, and needs numpy.
    """
    array = _byte_array().from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")[:size]


@functools.cache
def _byte_array() -> Any:
    import ctypes

    # One type for all lengths, cut afterwards: making a type for each length takes 7 us, more than
    # all the rest.
    return ctypes.c_ubyte * sys.maxsize


def _settled(tensor: Any) -> Any:
    """Return the same numbers, contiguous in host memory, with nothing left to be applied to
    them."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.is_contiguous() and tensor.itemsize == 1:
        # Several kinds of one byte (int4 and its like) cannot be copied with strides; their bytes
        # can.
        return tensor.view(sys.modules["torch"].uint8).contiguous().view(tensor.dtype).cpu()
    return tensor.contiguous().cpu()


def _unsuited(tensor: Any) -> tuple[str, tuple[str, str]] | None:
    """Return why the memory of this tensor is not all there is to it."""
    torch = sys.modules["torch"]
    if tensor.is_quantized:
        return "a quantized tensor", ("store the numbers", "{}.dequantize()")
    if tensor.is_nested:
        return "a nested tensor", ("store its tensors as a list", "list({}.unbind())")
    if tensor.layout is not torch.strided:
        return f"a sparse tensor ({tensor.layout})", ("store it dense", "{}.to_dense()")
    if tensor.is_meta:
        return "a meta tensor (it has no data)", (
            "store its shape and dtype",
            "({}.shape, {}.dtype)",
        )
    if not _shape_fits(tensor.shape, tensor.itemsize):
        return f"a tensor of {tensor.ndim} dimensions and {tensor.numel()} elements", (
            f"{MAX_DIMENSIONS} dimensions are possible",
            "",
        )
    return None


def _shape_fits(shape: Iterable[int], itemsize: int) -> bool:
    """Tell whether every stride of an array of this shape is a number of 64 bits, also when the
    array is empty."""
    dimensions = tuple(shape)
    return len(dimensions) <= MAX_DIMENSIONS and (
        all(dimensions) or math.prod(n or 1 for n in dimensions) * itemsize < _INT64
    )


@functools.lru_cache(maxsize=64)
def _array_dtype(dtype: Any) -> str | None:
    """Return the name of a numpy dtype from which numpy makes an equal one, or None if its bytes
    are not all there is to it."""
    numpy: Any = sys.modules["numpy"]
    if (
        dtype.kind not in _RAW_KINDS
        or dtype.hasobject
        or dtype.names
        or dtype.subdtype
        or not dtype.itemsize
    ):
        return None
    name: str = dtype.str
    if not _RAW_DTYPE.fullmatch(name) or numpy.dtype(name) != dtype:
        return None  # a dtype of another package: ml_dtypes.bfloat16 is "<V2"
    # A longdouble has another format on each kind of processor, all called "<f16".
    return None if dtype in (numpy.longdouble, numpy.clongdouble) else name


# --- why not ---


_INSTEAD = (
    (
        "torch",
        "Tensor",
        " (a subclass of torch.Tensor)",
        "store the tensors that it is made of",
        "",
    ),
    ("torch.nn", "Module", "", "store its state", "{}.state_dict()"),
    ("numpy", "ndarray", " (a subclass of numpy.ndarray)", "make it an array", "numpy.array({})"),
    ("builtins", "bytearray", "", "store a copy", "bytes({})"),
    ("builtins", "memoryview", "", "store a copy", "bytes({})"),
    ("enum", "Enum", " (a member of an Enum)", "store its value", "{}.value"),
    ("builtins", "range", "", "make it a list", "list({})"),
    ("pathlib", "PurePath", "", "store it as text", "str({})"),
    ("datetime", "date", "", "store it as text", "{}.isoformat()"),
    ("datetime", "time", "", "store it as text", "{}.isoformat()"),
    ("datetime", "timedelta", "", "store its seconds", "{}.total_seconds()"),
)
"""Module and class of what is no value, what it is called, and what to store in its place."""


def _why_not(value: object) -> tuple[str, tuple[str, str]]:
    """Return what a value of no known type is, and what to store in its place."""
    a = article(_name(type(value)))
    for module, name, what, sentence, command in _INSTEAD:
        known = getattr(sys.modules.get(module), name, None)
        if known is not None and isinstance(value, known):
            return a + what, (sentence, command)
    for base in (int, float, str, bytes, list, tuple, set, frozenset, OrderedDict, dict):
        if isinstance(value, base):
            what = f"{a} (a subclass of {base.__name__})"
            if hasattr(value, "_asdict"):
                return what, ("store its fields", "{}._asdict()")
            return what, (f"make it {article(base.__name__)}", f"{base.__name__}({{}})")
    if hasattr(value, "__dict__") and not callable(value):
        return a, ("store its attributes", "vars({})")
    return a, ("store what it is made of: numbers, text, bytes, containers, tensors, arrays", "")


def _why_not_array(value: Any) -> tuple[str, tuple[str, str]]:
    dtype = value.dtype
    what = f"a numpy {'array' if hasattr(value, 'strides') and value.ndim else 'value'} of dtype {dtype}"
    if dtype.names:
        return what, ("store its fields", "{name: {}[name] for name in {}.dtype.names}")
    if dtype.hasobject:
        return f"{what} (Python objects)", ("store a list", "{}.tolist()")
    if dtype.char in "gG":  # longdouble
        return what, ("store float64 or complex128, which are alike on all processors", "")
    return what, ("store it with a dtype of numpy whose elements are plain bytes", "")


def _name(kind: type) -> str:
    return (
        kind.__qualname__
        if kind.__module__ in {"builtins", "__main__"}
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def article(noun: str) -> str:
    """With "a" or "an", by how it is spoken: an int, a uuid.UUID, an LSTM, a Server."""
    if noun[:1].isupper() and not noun[1:2].islower():  # spoken letter by letter
        vowel = noun[0] in "AEFHILMNORSX"
    else:
        vowel = noun[:1].lower() in tuple("aeiou") and not noun.lower().startswith(
            ("uu", "uni", "use", "usa", "uti", "ure", "eu", "one")
        )
    return f"an {noun}" if vowel else f"a {noun}"


def shown(key: object) -> str:
    """Return a key as one would type it between the brackets, if that is short."""
    if type(key) is int:
        return str(key) if key.bit_length() <= 64 else f"{hex(key)[:24]}..."
    if type(key) is str and key.isprintable() and not {'"', "\\"} & set(key):
        text = f'"{key}"'
    else:
        text = repr(key)
    return text if len(text) <= 60 else f"{text[:56]}..."


# --- reading ---


class _ValueReader:
    """Builds a value from its tree and takes its buffers, in the tree's order, from behind it."""

    __slots__ = ("allow_pickle", "at", "hashed", "shared", "target", "view")

    def __init__(self, view: memoryview, at: int, allow_pickle: bool, device: Any) -> None:
        self.view = view
        self.at = at
        self.shared = not view.readonly
        self.hashed = False  # inside a set
        self.allow_pickle = allow_pickle
        self.target = device

    def value(self, node: object, depth: int) -> object:
        kind = type(node)
        if kind in _LEAVES:
            return node
        if kind is list and node and depth <= MAX_DEPTH:
            tag = node[0]  # type: ignore[index]
            if type(tag) is int and 0 <= tag < len(_READ):
                return _READ[tag](self, node, depth)  # type: ignore[arg-type]
        raise _malformed(
            "it is nested too deep"
            if depth > MAX_DEPTH
            else f"its tree has a node {str(node)[:40]!r}"
        )

    def take(self, size: object) -> memoryview:
        """Return the next buffer."""
        if type(size) is not int or size < 0:
            raise _malformed(f"a buffer of {str(size)[:40]} bytes")
        if not size:
            return self.view[:0]
        start = self.at + -self.at % ALIGNMENT
        end = start + size
        if end > len(self.view):
            raise _malformed(
                f"a buffer of {size} bytes where {max(0, len(self.view) - start)} are left"
            )
        self.at = end
        return self.view[start:end]

    def items(self, nodes: _Node, depth: int) -> list[object]:
        if _LEAVES.issuperset(map(type, nodes)):
            return nodes
        return [self.value(node, depth + 1) for node in nodes]

    def elements(self, node: _Node, depth: int) -> frozenset[object]:
        outside, self.hashed = self.hashed, True
        items = self.items(node[1:], depth)
        self.hashed = outside
        try:
            elements = frozenset(items)
        except TypeError:
            raise _malformed("a set with an element that has no hash") from None
        if len(elements) != len(node) - 1:
            raise _malformed("a set with the same element twice")
        return elements

    def ordered(self, node: _Node, depth: int) -> object:
        if len(node) < 2:
            raise _malformed("an OrderedDict that ends too early")
        found: OrderedDict[Any, object] = OrderedDict()
        if node[1] is not None:
            found._metadata = self.value(node[1], depth + 1)  # type: ignore[attr-defined]
        return self.pairs(found, node, 2, depth)

    def complex_(self, node: _Node, depth: int) -> object:
        if list(map(type, node[1:])) != [float, float]:
            raise _malformed("a complex number that is not two floats")
        return complex(node[1], node[2])  # type: ignore[call-overload]

    def pairs(
        self, found: dict[Any, object], node: _Node, start: int, depth: int
    ) -> dict[Any, object]:
        count, odd = divmod(len(node) - start, 2)
        if odd:
            raise _malformed("a dict with a key and no value")
        keys = self.items(node[start : start + count], depth)
        if not _KEYS.issuperset(map(type, keys)):
            raise _malformed("a dict with a key that is not int, str or bool")
        found.update(zip(keys, self.items(node[start + count :], depth), strict=True))
        if len(found) != count:
            raise _malformed("a dict with the same key twice")
        return found

    def text(self, node: _Node, depth: int) -> object:
        try:
            return str(self.take(_only(node, int)), "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise _malformed("text that is not UTF-8") from None

    def tensor(self, node: _Node, depth: int) -> object:
        if self.hashed:
            raise _malformed("a set with a tensor")
        torch: Any = _needed("torch")
        dtype = _torch_dtype(_text_of(node))
        shape, size = _shape(node, dtype.itemsize)
        if size:
            memory = self.take(size)
            flat = torch.frombuffer(memory if self.shared else bytearray(memory), dtype=dtype)
        else:  # there is no tensor of an empty buffer, and torch.empty() follows the default device
            flat = torch.frombuffer(bytearray(dtype.itemsize), dtype=dtype)[:0]
        tensor = flat.view(shape)
        return tensor if self.target is None else tensor.to(self.target)

    def array(self, node: _Node, depth: int) -> object:
        numpy: Any = _needed("numpy")
        dtype = _numpy_dtype(_text_of(node))
        shape, size = _shape(node, dtype.itemsize)
        if not size:
            return numpy.empty(shape, dtype)
        memory = self.take(size)
        return numpy.frombuffer(memory if self.shared else bytearray(memory), dtype).reshape(shape)

    def number(self, node: _Node, depth: int) -> object:
        numpy: Any = _needed("numpy")
        dtype = _numpy_dtype(_text_of(node))
        data = node[2] if len(node) == 3 else None
        if type(data) is not bytes or len(data) != dtype.itemsize:
            raise _malformed(
                f"a numpy value of dtype {dtype} with other than {dtype.itemsize} bytes"
            )
        return numpy.frombuffer(bytearray(data), dtype)[0]

    def of(self, kind: type, node: _Node, depth: int) -> object:
        value = self.value(node[1], depth + 1) if len(node) == 2 else None
        if type(value) is not kind:
            raise _malformed(f"a numpy {kind.__name__} made of something else")
        return value

    def size(self, node: _Node, depth: int) -> object:
        shape = node[1:]
        if not all(type(n) is int and -_INT64 <= n < _INT64 for n in shape):
            raise _malformed("a torch.Size of something else than integers")
        return _needed("torch").Size(shape)

    def device(self, node: _Node, depth: int) -> object:
        torch = _needed("torch")
        kind, index = node[1:] if len(node) == 3 else (None, None)
        if (
            type(kind) is str
            and kind.isalnum()
            and (index is None or (type(index) is int and 0 <= index < 128))
        ):
            try:
                return torch.device(kind) if index is None else torch.device(kind, index)
            except RuntimeError:
                pass  # no such kind of device in this build
        raise _malformed(f"a torch.device {str(node[1:])[:40]}")

    def pickled(self, node: _Node, depth: int) -> object:
        data = self.take(_only(node, int))
        if not self.allow_pickle:
            raise ValueUnsupported(
                "value-unsupported",
                "the value was pickled, and this client does not unpickle",
                help=(
                    (
                        "if you trust everybody who can write to this store",
                        "rallypoint.connect(..., allow_pickle=True)",
                    ),
                ),
            )
        import pickle

        try:
            return pickle.loads(data)
        except Exception as error:  # whatever a pickle raises: a class that is not here, for one
            raise ValueUnsupported(
                "value-unsupported",
                f"the value cannot be unpickled: {type(error).__name__}: {error}",
            ) from error


_READ: tuple[Callable[[_ValueReader, _Node, int], object], ...] = (
    lambda reader, node, depth: reader.items(node[1:], depth),
    lambda reader, node, depth: tuple(reader.items(node[1:], depth)),
    lambda reader, node, depth: set(reader.elements(node, depth)),
    _ValueReader.elements,
    lambda reader, node, depth: reader.pairs({}, node, 1, depth),
    _ValueReader.ordered,
    lambda reader, node, depth: int.from_bytes(_only(node, bytes), "little", signed=True),
    _ValueReader.text,
    lambda reader, node, depth: bytes(reader.take(_only(node, int))),
    _ValueReader.tensor,
    _ValueReader.array,
    _ValueReader.number,
    lambda reader, node, depth: _needed("numpy").str_(reader.of(str, node, depth)),
    lambda reader, node, depth: _needed("numpy").bytes_(reader.of(bytes, node, depth)),
    _ValueReader.size,
    lambda reader, node, depth: _needed("torch") and _torch_dtype(_only(node, str)),
    _ValueReader.device,
    _ValueReader.pickled,
    _ValueReader.complex_,
    lambda reader, node, depth: Counter(reader.pairs({}, node, 1, depth)),
)
"""Reader of each kind of node, by its number."""


def _malformed(why: str) -> ValueUnsupported:
    return ValueUnsupported("value-malformed", f"these are not the bytes of a value: {why}")


def _needed(name: str) -> Any:
    """Import torch or numpy. Raises ValueUnsupported where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        text = f"the value needs {name}, which cannot be imported here: {error}"
        command = f"{shlex.quote(sys.executable)} -m pip install {name}"
        help = ((f"install {name} where this value is read", command),)
        raise ValueUnsupported("value-unsupported", text, help=help) from error


def _text_of(node: _Node) -> str | None:
    """Return what is behind the tag, if it is a str."""
    second = node[1] if len(node) > 1 else None
    return second if type(second) is str else None


def _only(node: _Node, kind: type) -> Any:
    """Return the one thing that this node has behind its tag."""
    if len(node) != 2 or type(node[1]) is not kind:
        raise _malformed(f"a node {str(node)[:40]} without its one {kind.__name__}")
    return node[1]


def _shape(node: _Node, itemsize: int) -> tuple[list[Any], int]:
    """Return the shape in the node of a tensor or array, and how many bytes it has."""
    shape: list[Any] = node[2:]
    if not all(type(n) is int and 0 <= n < _INT64 for n in shape) or not _shape_fits(
        shape, itemsize
    ):
        raise _malformed(f"a shape {str(shape)[:40]}")
    return shape, math.prod(shape) * itemsize


@functools.cache
def _torch_dtypes() -> dict[str, Any]:
    torch: Any = sys.modules["torch"]
    found = (getattr(torch, name) for name in dir(torch))
    return {str(dtype)[6:]: dtype for dtype in found if isinstance(dtype, torch.dtype)}


def _torch_dtype(name: str | None) -> Any:
    dtype = _torch_dtypes().get(name) if name is not None else None
    if dtype is None:
        raise _malformed(f"a torch dtype {name!r:.40}, which this torch does not have")
    return dtype


@functools.lru_cache(maxsize=64)
def _numpy_dtype(name: str | None) -> Any:
    numpy: Any = sys.modules["numpy"]
    if name is not None and _RAW_DTYPE.fullmatch(name):
        try:
            dtype = numpy.dtype(name)
        except (TypeError, ValueError, OverflowError):
            dtype = None
        if dtype is not None and _array_dtype(dtype) == name:
            return dtype
    raise _malformed(f"a numpy dtype {name!r:.40}")

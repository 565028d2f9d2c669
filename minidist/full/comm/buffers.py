"""What travels: numpy arrays and torch tensors, without importing torch.

A caller's *buffer* has any shape. Inside, everything is a flat *array*: a one-dimensional view of
the same memory.

    numpy array, or CPU tensor of a dtype that numpy knows  ->  numpy array
    bfloat16 and CUDA tensors                               ->  torch tensor
    meta tensor                                             ->  `Nowhere`, which torch need not be asked to cut

So a float32 tensor and a float32 array take the same path, and torch is only touched when a tensor
came in.
"""

from __future__ import annotations

import ctypes
import math
import sys
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeGuard, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch


class Buffer(Protocol):
    """A numpy array or a torch tensor, of any shape."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def device(self) -> Any: ...

    @property
    def itemsize(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class Array(Buffer, Protocol):
    """A buffer of one dimension."""

    def __len__(self) -> int: ...

    def view(self, dtype: Any, /) -> Any: ...

    def __getitem__(self, part: slice, /) -> Self: ...

    def __itruediv__(self, divisor: int, /) -> Self: ...


Kind = TypeVar("Kind", bound=Buffer)  # an array where an array went in, a tensor where a tensor did

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool")
DTYPES = FLOATS + INTEGERS
# Asking a dtype for its name takes 2 microseconds.
NAMES: dict[object, str] = {np.dtype(name): name for name in DTYPES if name != "bfloat16"}


class Nowhere:
    """The flat array of a tensor on `meta`: so many elements of a dtype, and no memory.

    To cut a tensor takes torch two microseconds, whether it has memory or not. Where ranks are
    simulated that is a large part of what a message costs. Equal pieces, cut one after the other, are
    one object: a thousand ranks cut a buffer into a million chunks.
    """

    __slots__ = ("dtype", "itemsize", "length", "nbytes", "piece")
    device, is_meta = "meta", True

    def __init__(self, dtype: Any, itemsize: int, length: int) -> None:
        self.dtype, self.itemsize, self.length = dtype, itemsize, length
        self.nbytes = itemsize * length
        self.piece: Self | None = None  # the last one that was cut

    @property
    def shape(self) -> tuple[int, ...]:
        """As of any array of one dimension."""
        return (self.length,)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice, /) -> Self:
        length, piece = len(range(*part.indices(self.length))), self.piece
        if piece is None or piece.length != length:
            piece = self.piece = self.new_empty(length)
        return piece

    def new_empty(self, length: int) -> Self:
        """Return another one, of so many elements."""
        return type(self)(self.dtype, self.itemsize, length)

    def view(self, dtype: Any, /) -> Self:
        """Return the same bytes as elements of another dtype."""
        return type(self)(dtype, dtype.itemsize, self.nbytes // dtype.itemsize)

    def __itruediv__(self, divisor: int, /) -> Self:
        return self


def is_tensor(buffer: object) -> TypeGuard[torch.Tensor]:
    """Tell whether `buffer` is a torch tensor. Nobody can hold one before torch was imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(buffer, torch.Tensor)


def flatten(buffer: Buffer, writable: bool = False) -> Array:
    """Return a one-dimensional view of the buffer's own memory. With `writable`, refuse read-only
    memory.

    Raises
    ------
    TypeError
        If it is neither an array nor a tensor, or of a dtype that no wire carries.
    ValueError
        If it is not contiguous: a view could then not be flat. If it is read-only and must not be.
    """
    if type(buffer) is np.ndarray:
        flags = buffer.flags
        if not flags.c_contiguous:
            raise ValueError(
                f"buffer of shape {buffer.shape} is not contiguous: say "
                "x = numpy.ascontiguousarray(x), and pass that x, which gets the result"
            )
        if buffer.dtype not in NAMES:
            raise _unsupported(buffer.dtype)
        if writable and not flags.writeable:
            raise ValueError(
                f"buffer of shape {buffer.shape} is read-only and cannot receive: pass a copy of it"
            )
        return buffer if buffer.ndim == 1 else buffer.reshape(-1)
    if type(buffer) is Nowhere:
        return buffer
    if not is_tensor(buffer):
        shown = f"{type(buffer).__name__}: {' '.join(repr(buffer).split()):.60}"
        raise TypeError(
            f"a buffer is a plain numpy array (as of numpy.asarray) or a torch tensor, not {shown}"
        )
    flat, name = buffer, _name_of(buffer.dtype)
    if name not in DTYPES:
        raise _unsupported(buffer.dtype)
    library = sys.modules["torch"]
    if flat.layout is not library.strided or flat.is_neg() or not flat.is_contiguous():
        raise ValueError(
            f"tensor of shape {tuple(flat.shape)} is not contiguous, its numbers one after the other "
            f"as they are ({flat.layout}, negated by its view: {flat.is_neg()}): say "
            "x = x.to_dense().resolve_neg().contiguous(), pass x"
        )
    if flat.is_meta:
        return Nowhere(flat.dtype, flat.itemsize, flat.numel())
    if type(flat) is not library.Tensor:  # such as a part of a gradient, which refuses an index
        flat = flat.as_subclass(library.Tensor)
    if name != "bfloat16" and flat.device.type == "cpu":
        return memory_of(flat, name)
    if flat.dim() != 1 or flat.requires_grad or not flat.numel():
        # an empty tensor may have stride 0
        flat = flat.detach().view(-1) if flat.numel() else flat.new_empty(0)
    return flat


def memory_of(tensor: torch.Tensor, dtype: str) -> np.ndarray[Any, Any]:
    """View a CPU tensor as a flat numpy array.

    Not by its `numpy()`: after that, torch would refuse to free the memory of a sharded parameter.
    """
    if not tensor.nbytes:
        return np.empty(0, dtype)
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # which has to live as long as the view
    return np.frombuffer(memory, dtype)


def _unsupported(dtype: object) -> TypeError:
    return TypeError(
        f"buffers of dtype {dtype} do not travel: convert to one of {', '.join(DTYPES)}, in "
        "native order"
    )


def dtype_name(array: Buffer) -> str:
    """Return the dtype's name, the same for both libraries: `float32`, `bfloat16`, ..."""
    return NAMES.get(array.dtype) or _name_of(array.dtype)


@cache
def _name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def device_name(array: Buffer) -> str:
    """Return `cpu`, `cuda` or `meta`."""
    if isinstance(array, np.ndarray):
        return "cpu"
    return "meta" if array.is_meta else str(array.device.type)  # type: ignore[attr-defined]


def empty(array: Array, count: int) -> Array:
    """Return an uninitialised flat array of `count` elements, of the kind, dtype and device of
    `array`.
    """
    if isinstance(array, np.ndarray):
        return np.empty(count, array.dtype)
    emptied: Array = array.new_empty(count)  # type: ignore[attr-defined]
    return emptied


def new_rows(like: Any, rows: int) -> Any:
    """Return an uninitialised buffer of `rows` rows, otherwise like `like`."""
    shape = (rows, *like.shape[1:])
    return like.new_empty(shape) if is_tensor(like) else np.empty(shape, like.dtype)


def moved(buffer: Any, axis: int, to: int) -> Any:
    """Return a contiguous buffer in which an axis stands at another place."""
    if is_tensor(buffer):
        return buffer.movedim(axis, to).contiguous()
    return np.ascontiguousarray(np.moveaxis(buffer, axis, to))


def described(full: Any) -> tuple[tuple[int, ...], str, str]:
    """Return shape, dtype and device, `numpy` for an array."""
    return tuple(full.shape), dtype_name(full), device_name(full) if is_tensor(full) else "numpy"


def template(shape: tuple[int, ...], dtype: str, device: str) -> Buffer:
    """Return a buffer of this shape, dtype and device that takes no memory."""
    if device == "numpy":
        return np.broadcast_to(np.empty((), dtype), shape)
    import torch

    return torch.empty((), dtype=getattr(torch, dtype), device=device).expand(shape)


def as_bytes(array: Array) -> Any:
    """Return a flat CPU array as numpy bytes, sharing memory."""
    if isinstance(array, np.ndarray):
        return array.view(np.uint8)
    assert is_tensor(array)
    return memory_of(array, "uint8")


class Chunks(list[Any]):
    """Consecutive views of a flat array.

    Attributes
    ----------
    whole : Array
        The array.
    lengths : list[int]
        The number of elements of each.
    brought : Array or None
        For an all-gather: this rank's shard, of which its chunk is a copy.
    """

    def __init__(self, whole: Array, lengths: list[int], brought: Array | None = None) -> None:
        super().__init__(
            whole[end - length : end]
            for length, end in zip(lengths, accumulate(lengths), strict=True)
        )
        self.whole, self.lengths, self.brought = whole, lengths, brought


def copy(target: Array, source: Array) -> None:
    """Copy bytes between flat arrays of equal size, whatever their dtypes. Meta arrays hold nothing
    to copy.
    """
    if type(target) is Nowhere and type(source) is Nowhere:
        return
    if isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
        if target.dtype is source.dtype:
            target[...] = source
        else:
            as_bytes(target)[...] = as_bytes(source)
    elif device_name(target) == "cpu" and device_name(source) == "cpu":
        as_bytes(target)[:] = as_bytes(source)
    elif is_tensor(target) and is_tensor(source) and target.device.type == source.device.type:
        if target.data_ptr() != source.data_ptr():  # in place there is nothing to do
            target.copy_(source)
    else:
        ends = f"a {device_name(source)} buffer was sent to a {device_name(target)} one"
        raise ValueError(f"{ends}: move both to one device")


def dtype_of(dtype: Any) -> Any:
    """Return a dtype of torch as it is, and what else numpy takes for a dtype as numpy's."""
    torch = sys.modules.get("torch")
    return dtype if torch is not None and isinstance(dtype, torch.dtype) else np.dtype(dtype)


def shaped(memory: Any, shape: int | tuple[int, ...], dtype: Any) -> Buffer:
    """View bytes as a buffer of `shape` and `dtype`: a tensor for a torch dtype, else a numpy
    array.
    """
    used = memory[: math.prod([shape] if isinstance(shape, int) else shape) * dtype.itemsize]
    return view_as(used, dtype).reshape(shape)  # type: ignore[no-any-return]


def view_as(memory: Any, dtype: Any) -> Any:
    """View bytes as elements of `dtype`: a tensor for a torch dtype, else a numpy array."""
    if not isinstance(dtype, np.dtype) and not is_tensor(memory):  # on a GPU it is
        memory = sys.modules["torch"].from_numpy(memory)
    return memory.view(dtype)


def address(array: Buffer) -> int:
    """Return where the array's memory begins."""
    if not isinstance(array, np.ndarray):
        assert is_tensor(array)
        return array.data_ptr()
    if array.size and array.flags.writeable:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]  # 5 times as fast as below
    return int(array.__array_interface__["data"][0])

"""torch's tensors as our buffers: flat, contiguous, of a dtype that travels.

strided      ->  a contiguous copy, copied back where it receives
complex      ->  its real view, twice as long
8-bit float  ->  its bytes, where nothing is computed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.utils.dlpack import from_dlpack

from minidist.full.collectives.reduction import BITWISE
from minidist.full.comm.buffers import DTYPES

REDUCTIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "and",
    ReduceOp.BOR: "or",
    ReduceOp.BXOR: "xor",
}


class Flat:
    """A tensor, and the flat buffer that travels for it.

    Attributes
    ----------
    buffer : Tensor
        One dimension; the tensor's own memory where that is possible.
    unit : int
        Elements of `buffer` for one of the tensor: 2 for complex numbers.
    """

    def __init__(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided:
            raise TypeError(
                f"a tensor of layout {tensor.layout} does not travel: pass tensor.to_dense()"
            )
        self.tensor = tensor.detach()
        own = self.tensor.resolve_conj().resolve_neg().contiguous()
        self.unit = 2 if own.is_complex() else 1
        real = torch.view_as_real(own) if own.is_complex() else own
        if str(real.dtype).startswith("torch.float8"):
            real = real.view(torch.uint8)
        self.buffer = beside(real).view(-1)
        self.own, self.copied = own, own is not self.tensor and own.data_ptr() != tensor.data_ptr()

    def land(self) -> None:
        """Have the tensor hold what arrived in the buffer."""
        if self.copied:
            self.tensor.copy_(self.own)


def beside(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory whose storage is another object. numpy fixes the size of a
    storage that it looks into, and FSDP and PowerSGD resize theirs.
    """
    return tensor if tensor.device.type != "cpu" else from_dlpack(tensor)


def flat(tensors: Sequence[Tensor]) -> list[Flat]:
    """Return each tensor's."""
    return [Flat(tensor) for tensor in tensors]


def joined(parts: Sequence[Flat]) -> Tensor:
    """Return the buffers one after the other."""
    return torch.cat([part.buffer for part in parts])


def spread(whole: Tensor, parts: Sequence[Flat]) -> None:
    """Fill the tensors with consecutive parts of a flat buffer."""
    pieces = torch.split_with_sizes(whole, [len(part.buffer) for part in parts])
    for part, arrived in zip(parts, pieces, strict=True):
        part.buffer.copy_(arrived)
        part.land()


def reduction_of(op: Any, tensor: Tensor) -> str:
    """Return our name of one of torch's reductions.

    Raises
    ------
    NotImplementedError
        For a reduction that is not offered.
    TypeError
        For numbers that it cannot reduce.
    """
    name = next((name for one, name in REDUCTIONS.items() if op == one), "")
    if not name:
        raise NotImplementedError(
            f"minidist does not reduce with {op}: use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or "
            "BXOR, and multiply yourself"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_complex() and name not in ("sum", "mean"):
        raise TypeError(f"{dtype} numbers have no {name}: use SUM or AVG")
    if not tensor.is_complex() and dtype not in DTYPES:
        raise TypeError(f"tensors of {dtype} are not reduced: convert to bfloat16 or float32")
    if name == "mean" and not (tensor.is_complex() or tensor.is_floating_point()):
        raise TypeError(f"the average of {dtype} is not {dtype}: use SUM, and divide yourself")
    if name in BITWISE and tensor.is_floating_point():
        raise TypeError(f"{dtype} numbers are not reduced bit by bit: use SUM, AVG, MIN or MAX")
    return name

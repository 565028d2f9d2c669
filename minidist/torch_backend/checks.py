"""What is refused before anything is sent, and what the ranks compare besides a collective's own call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minidist.full.comm.agree import agree
from minidist.full.comm.communicator import Communicator
from minidist.full.comm.errors import MismatchError
from minidist.torch_backend.tensors import Flat


def agree_on_dtypes(comm: Communicator, call: str, parts: Sequence[Flat]) -> None:
    """In debug mode, compare dtypes that travel as others: the buffers of complex numbers and of
    8-bit floats look like those of other tensors.
    """
    disguised = [part.tensor.dtype for part in parts if part.tensor.dtype != part.buffer.dtype]
    if disguised:
        agree(comm, call, *(str(dtype).removeprefix("torch.") for dtype in disguised))


def check_count(comm: Communicator, call: str, what: str, count: int) -> None:
    """Refuse lists that have not one tensor for each rank."""
    if count != comm.size:
        raise ValueError(f"{call}: {count} {what} for {comm.size} ranks: give one a rank")


def check_outputs(call: str, outputs: Sequence[Tensor]) -> None:
    """Refuse expanded tensors, in which several numbers would arrive in one place."""
    for tensor in outputs:
        if 0 in tensor.stride() and tensor.numel() > 1:
            raise ValueError(
                f"{call}: an expanded tensor of shape {tuple(tensor.shape)} has not a place for "
                "each number that arrives: pass a clone, tensor.contiguous()"
            )


def check_whole(comm: Communicator, call: str, what: str, whole: Tensor, shard: Tensor) -> None:
    """Refuse a tensor that is not as large as all ranks' shards."""
    if whole.numel() != shard.numel() * comm.size or whole.dtype != shard.dtype:
        raise ValueError(
            f"{call}: an {what} of {whole.numel()} elements of {whole.dtype} is not "
            f"{comm.size} times the {shard.numel()} of {shard.dtype}: give it that size"
        )


def check_room(call: str, brought: list[int], outputs: Sequence[Flat]) -> None:
    """Refuse outputs that are not as large as what the ranks bring."""
    room = [len(part.buffer) // part.unit for part in outputs]
    if room != brought:
        raise MismatchError(
            f"{call}: the ranks bring {brought} elements for outputs of {room}: give each output "
            "the size of its rank's input"
        )


def elements(comm: Communicator, what: str, part: Flat, sizes: Sequence[int] | None) -> list[int]:
    """Return how many elements of the buffer go to, or come from, each rank."""
    rows = part.tensor.shape[0] if part.tensor.dim() else 1
    if not sizes:
        if rows % comm.size:
            raise ValueError(
                f"all_to_all_single: {rows} rows of the {what} do not divide by "
                f"{comm.size} ranks: say {what}_split_sizes"
            )
        sizes = [rows // comm.size] * comm.size
    if len(sizes) != comm.size or sum(sizes) != rows:
        raise ValueError(
            f"all_to_all_single: {what}_split_sizes={list(sizes)} must be {comm.size} "
            f"numbers that add up to the {rows} rows of the {what}"
        )
    row = len(part.buffer) // rows if rows else 0
    return [size * row for size in sizes]

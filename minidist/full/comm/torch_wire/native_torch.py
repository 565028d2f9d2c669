"""The collectives of gloo and NCCL, behind the same methods as MPI's in `mpi_wire/native_mpi.py`.

These two want equal shards. Where shards are unequal (7 elements on 2 ranks) there is one
broadcast, or one reduction, per shard; gather and scatter are an all-to-all in which one rank alone
receives, or sends. So does NCCL itself.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from minidist.full.comm.buffers import INTEGERS, Array, Chunks, device_name, dtype_name, is_tensor
from minidist.full.comm.engine.operation import Operation, check_reducible
from minidist.full.comm.ledger import Ranks
from minidist.full.comm.torch_wire.stalls import Stalls
from minidist.full.comm.torch_wire.torch_request import explaining

Op = dist.ReduceOp
OPERATIONS = {
    "sum": Op.SUM,
    "max": Op.MAX,
    "min": Op.MIN,
    "prod": Op.PRODUCT,
    "and": Op.BAND,
    "or": Op.BOR,
    "xor": Op.BXOR,
}
BITWISE = ("and", "or", "xor")  # which NCCL does not know, nor gloo for truth values
UNKNOWN = ("int16", "uint16", "uint32", "uint64")  # dtypes that neither engine reduces

# in errors of the two, if a rank is gone
LOST = re.compile("onnection|roken pipe|closure|abort|Timed out")

# torch 2.13 renamed the two
gather_whole = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_whole = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def stalling(collective: Callable[..., None]) -> Callable[..., None]:
    """Have the time that the GPU waits in a collective counted, if anybody counts, and the loss of a
    rank told in our words.
    """

    @wraps(collective)
    def counted(self: "NativeTorch", *args: Any) -> None:
        try:
            with self.stalls.one():
                collective(self, *args)
        except RuntimeError as error:
            if not LOST.search(str(error)):
                raise
            with explaining("another rank"):
                raise

    return counted


@dataclass
class NativeTorch:
    """torch.distributed's collectives on flat arrays, called as all algorithms of the collectives
    are.
    """

    addresses: Sequence[int]
    cpu: dist.ProcessGroup
    cuda: dist.ProcessGroup | None
    byte_tensor: Callable[[Any], torch.Tensor]
    stalls: Stalls

    @stalling
    def all_reduce(self, array: Array, comm: Ranks, combine: Operation) -> None:
        """dist.all_reduce."""
        tensor, operation = self._reducible(array, combine), OPERATIONS[combine.op]
        dist.all_reduce(tensor, operation, self._group(tensor))

    @stalling
    def reduce(
        self,
        array: Array,
        comm: Ranks,
        root: int,
        combine: Operation,
    ) -> None:
        """dist.reduce, in place at the root. The engine uses the other ranks' buffers as its own:
        they give a copy.
        """
        tensor, operation = self._reducible(array, combine), OPERATIONS[combine.op]
        if comm.rank != root:
            tensor = tensor.clone()
        dist.reduce(tensor, self.addresses[root], operation, self._group(tensor))

    @stalling
    def broadcast(self, array: Array, comm: Ranks, root: int) -> None:
        """dist.broadcast."""
        tensor = self.byte_tensor(array)
        dist.broadcast(tensor, self.addresses[root], self._group(tensor))

    @stalling
    def reduce_scatter(
        self,
        chunks: Chunks,
        out: Array,
        comm: Ranks,
        combine: Operation,
    ) -> None:
        """dist.reduce_scatter_single; with unequal chunks one dist.reduce each."""
        full, shard, operation = (
            self._reducible(chunks.whole, combine),
            self._reducible(out, combine),
            OPERATIONS[combine.op],
        )
        group = self._group(full)
        if self._in_order(group) and len(set(chunks.lengths)) == 1:
            scatter_whole(shard, full, operation, group)
            return
        for rank, piece in enumerate(full.split_with_sizes(chunks.lengths)):
            copy = piece.clone()
            dist.reduce(copy, self.addresses[rank], operation, group)
            if rank == comm.rank:
                shard.copy_(copy)

    @stalling
    def all_gather(self, chunks: Chunks, comm: Ranks) -> None:
        """dist.all_gather_single, in place; with unequal chunks one dist.broadcast each."""
        full = self.byte_tensor(chunks.whole)
        pieces, group = full.split_with_sizes(_in_bytes(chunks)), self._group(full)
        if self._in_order(group) and len(set(chunks.lengths)) == 1:
            gather_whole(full, pieces[comm.rank], group)
            return
        for rank, piece in enumerate(pieces):
            dist.broadcast(piece, self.addresses[rank], group)

    def gather(
        self, shard: Array, chunks: Chunks | None, comm: Ranks, root: int, lengths: list[int]
    ) -> None:
        """dist.all_to_all_single, in which the root alone receives."""
        self.all_to_all(
            _only(root, shard, comm),
            chunks or _only(root, shard[:0], comm),
            comm,
        )

    def scatter(
        self, chunks: Chunks | None, shard: Array, comm: Ranks, root: int, lengths: list[int]
    ) -> None:
        """dist.all_to_all_single, in which the root alone sends."""
        self.all_to_all(
            chunks or _only(root, shard[:0], comm),
            _only(root, shard, comm),
            comm,
        )

    @stalling
    def all_to_all(self, leaving: Chunks, arriving: Chunks, comm: Ranks) -> None:
        """dist.all_to_all_single."""
        out, into = self.byte_tensor(leaving.whole), self.byte_tensor(arriving.whole)
        sent, received, group = _in_bytes(leaving), _in_bytes(arriving), self._group(out)
        if self._in_order(group):
            dist.all_to_all_single(into, out, received, sent, group)
            return
        order, pieces, arrived = (
            self._order(group),
            out.split_with_sizes(sent),
            torch.empty_like(into),
        )
        ordered = [received[rank] for rank in order]
        dist.all_to_all_single(
            arrived, torch.cat([pieces[r] for r in order]), ordered, [sent[r] for r in order], group
        )
        pieces = arrived.split_with_sizes(ordered)
        torch.cat([pieces[order.index(rank)] for rank in range(comm.size)], out=into)

    def _reducible(self, array: Array, combine: Operation) -> torch.Tensor:
        check_reducible("torch's gloo and NCCL", array, UNKNOWN)
        if combine.op in BITWISE:
            if device_name(array) == "cuda":
                check_reducible("NCCL, bit by bit,", array, INTEGERS)
            check_reducible("gloo, bit by bit,", array, ("bool",))
        return (
            array
            if is_tensor(array)
            else self.byte_tensor(array).view(getattr(torch, dtype_name(array)))
        )

    def _group(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        return self.cuda if tensor.is_cuda and self.cuda is not None else self.cpu

    def _order(self, group: dist.ProcessGroup) -> list[int]:
        """Return our number of each of torch's ranks: torch sorts the ranks of a group, `split`
        obeys its key.
        """
        return [self.addresses.index(address) for address in dist.get_process_group_ranks(group)]

    def _in_order(self, group: dist.ProcessGroup) -> bool:
        return self._order(group) == list(range(len(self.addresses)))


def _in_bytes(chunks: Chunks) -> list[int]:
    return [length * chunks.whole.itemsize for length in chunks.lengths]


def _only(root: int, shard: Array, comm: Ranks) -> Chunks:
    """Return a shard as what is the root's, and nothing for the other ranks."""
    return Chunks(shard, [len(shard) if rank == root else 0 for rank in range(comm.size)])

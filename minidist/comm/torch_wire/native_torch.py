"""The collectives of gloo and NCCL, behind the same methods as MPI's in `native.py`.

These two want equal shards. Where shards are unequal (7 elements on 2 ranks) there is one broadcast, or one reduction,
per shard; gather and scatter are an all-to-all in which one rank alone receives, or sends. So does NCCL itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from minidist.comm.buffers import dtype_name
from minidist.comm.engine.operation import known_operation

if TYPE_CHECKING:
    from minidist.comm.buffers import Array

OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
UNKNOWN = ("int16", "uint16", "uint32", "uint64")  # dtypes that neither engine reduces

# torch 2.13 renamed the two
gather_whole = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_whole = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NativeTorch:
    """torch.distributed's collectives on flat arrays. `counts` are the elements of each rank's shard."""

    def __init__(
        self,
        rank: int,
        addresses: Sequence[int],
        cpu: dist.ProcessGroup,
        cuda: dist.ProcessGroup | None,
        byte_tensor: Callable[[Any], torch.Tensor],
    ):
        self.rank, self.addresses, self.cpu, self.cuda, self.byte_tensor = rank, addresses, cpu, cuda, byte_tensor

    def all_reduce(self, array: Array, op: str) -> None:
        """dist.all_reduce."""
        tensor, operation = self._tensor(array), _operation(op, array)
        dist.all_reduce(tensor, operation, self._group(tensor))

    def reduce(self, array: Array, root: int, op: str) -> None:
        """dist.reduce, in place at the root. The engine uses the other ranks' buffers as its own: they give a copy."""
        tensor, operation = self._tensor(array), _operation(op, array)
        if self.rank != root:
            tensor = tensor.clone()
        dist.reduce(tensor, self.addresses[root], operation, self._group(tensor))

    def broadcast(self, array: Array, root: int) -> None:
        """dist.broadcast."""
        tensor = self.byte_tensor(array)
        dist.broadcast(tensor, self.addresses[root], self._group(tensor))

    def reduce_scatter(self, array: Array, shard: Array, counts: list[int], op: str) -> None:
        """dist.reduce_scatter_single; with unequal counts one dist.reduce per shard."""
        full, out, operation = self._tensor(array), self._tensor(shard), _operation(op, array)
        group = self._group(full)
        if self._in_order(group) and len(set(counts)) == 1:
            scatter_whole(out, full, operation, group)
            return
        for rank, piece in enumerate(full.split_with_sizes(counts)):
            copy = piece.clone()
            dist.reduce(copy, self.addresses[rank], operation, group)
            if rank == self.rank:
                out.copy_(copy)

    def all_gather(self, shard: Array, out: Array, counts: list[int]) -> None:
        """dist.all_gather_single; with unequal counts one dist.broadcast per shard."""
        full, mine = self.byte_tensor(out), self.byte_tensor(shard)
        group = self._group(mine)
        if self._in_order(group) and len(set(counts)) == 1:
            gather_whole(full, mine, group)
            return
        pieces = full.split_with_sizes(_in_bytes(counts, out))
        pieces[self.rank].copy_(mine)
        for rank, piece in enumerate(pieces):
            dist.broadcast(piece, self.addresses[rank], group)

    def gather(self, shard: Array, out: Array | None, counts: list[int], root: int) -> None:
        """dist.all_to_all_single, in which the root alone receives."""
        to_root, nothing = [len(shard) if rank == root else 0 for rank in range(len(counts))], [0] * len(counts)
        self.all_to_all(shard, to_root, *((shard[:0], nothing) if out is None else (out, counts)))

    def scatter(self, full: Array | None, shard: Array, counts: list[int], root: int) -> None:
        """dist.all_to_all_single, in which the root alone sends."""
        from_root, nothing = [len(shard) if rank == root else 0 for rank in range(len(counts))], [0] * len(counts)
        self.all_to_all(*((shard[:0], nothing) if full is None else (full, counts)), shard, from_root)

    def all_to_all(self, leaving: Array, send_counts: list[int], arriving: Array, receive_counts: list[int]) -> None:
        """dist.all_to_all_single."""
        out, into = self.byte_tensor(leaving), self.byte_tensor(arriving)
        sent, received = _in_bytes(send_counts, leaving), _in_bytes(receive_counts, arriving)
        group = self._group(out)
        if self._in_order(group):
            dist.all_to_all_single(into, out, received, sent, group)
            return
        order, pieces, arrived = self._order(group), out.split_with_sizes(sent), torch.empty_like(into)
        ordered = [received[rank] for rank in order]
        dist.all_to_all_single(arrived, torch.cat([pieces[r] for r in order]), ordered, [sent[r] for r in order], group)
        pieces = arrived.split_with_sizes(ordered)
        torch.cat([pieces[order.index(rank)] for rank in range(len(order))], out=into)

    def _tensor(self, array: Array) -> torch.Tensor:
        if isinstance(array, torch.Tensor):
            return array
        return self.byte_tensor(array).view(getattr(torch, dtype_name(array)))

    def _group(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        if tensor.is_cuda and self.cuda is not None:
            return self.cuda
        return self.cpu

    def _order(self, group: dist.ProcessGroup) -> list[int]:
        """Return our number of each of torch's ranks: torch sorts the ranks of a group, `split` obeys its key."""
        return [self.addresses.index(address) for address in dist.get_process_group_ranks(group)]

    def _in_order(self, group: dist.ProcessGroup) -> bool:
        return self._order(group) == list(range(len(self.addresses)))


def _operation(op: str, array: Array) -> dist.ReduceOp.RedOpType:
    return known_operation("torch's gloo and NCCL", op, array, OPERATIONS, UNKNOWN)


def _in_bytes(counts: list[int], array: Array) -> list[int]:
    return [count * array.itemsize for count in counts]

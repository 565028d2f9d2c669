"""The eight collectives, as users call them.

                     before                          after
    all_reduce       every rank a full array         every rank the reduction
    reduce_scatter   every rank a full array         rank r shard r of the reduction
    all_gather       rank r shard r                  every rank all shards
    broadcast        the root an array               every rank that array
    reduce           every rank a full array         the root the reduction
    gather           rank r shard r                  the root all shards
    scatter          the root a full array           rank r shard r
    all_to_all       rank r chunks for everybody     rank r everybody's chunks for r

Shards are `numpy.array_split`'s: cut along the first axis, as equal as can be, longer ones first. All ranks call the
same collectives in the same order. Results are the same bits on every rank. Costs stand with the algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.collectives.choose import agree, find
from minidist.collectives.fast import chunks_of, cut
from minidist.collectives.reduction import finish, reduction
from minidist.comm.buffers import copy, dtype_name, flatten, is_tensor

if TYPE_CHECKING:
    from minidist.comm.buffers import Buffer
    from minidist.comm.communicator import Communicator


def all_reduce(buffer: Buffer, comm: Communicator, op: str = "sum", algorithm: str = "auto") -> None:
    """Replace every rank's buffer by the reduction of all, in place.

    Parameters
    ----------
    buffer
        Contiguous, of the same size and dtype on every rank; its shape is left alone.
    op : {"sum", "mean", "max", "min", "prod"}
    algorithm : str
        `auto`, `ring`, `recursive`, `halving_doubling`, `tree`, `central`, `hierarchical`, `shared` or `native`.

    Raises
    ------
    ValueError, TypeError
        Before anything is sent, for a buffer, operation or algorithm that cannot be.
    MismatchError
        If the ranks' calls differ: in debug mode always and in words, otherwise where two message sizes show it.
    """
    array = flatten(buffer)
    combine = reduction(op, array)
    name, function = find("all_reduce", algorithm, array.nbytes, comm)
    agree(comm, ("all_reduce", dtype_name(array), len(array), op, name))
    if comm.size > 1:
        with comm.span("all_reduce " + name, "collective", array.nbytes):
            function(array, op) if name == "native" else function(array, comm.internal, combine)
    finish(op, array, comm.size)


def reduce_scatter(full: Buffer, comm: Communicator, op: str = "sum", algorithm: str = "auto") -> Buffer:
    """Return shard `comm.rank` of the reduction of all ranks' `full`, which stays as it is. Raises as `all_reduce`."""
    array = flatten(full)
    combine = reduction(op, array)
    name, function = find("reduce_scatter", algorithm, array.nbytes, comm)
    agree(comm, ("reduce_scatter", dtype_name(array), tuple(full.shape), op, name))
    rows, counts = _shards(full, comm.size)
    shard: Buffer = _new(full, rows[comm.rank])
    out, chunks = flatten(shard), chunks_of(array, counts)
    with comm.span("reduce_scatter " + name, "collective", array.nbytes):
        if comm.size == 1:
            copy(out, array)
        elif name == "native":
            function(array, out, counts, op)
        else:
            function(chunks, out, comm.internal, combine)
    finish(op, out, comm.size)
    return shard


def all_gather(
    shard: Buffer,
    comm: Communicator,
    out: Buffer | None = None,
    algorithm: str = "auto",
    counts: Sequence[int] | None = None,
) -> Buffer:
    """Return all ranks' shards, one after the other along the first axis. Raises as `all_reduce`.

    Parameters
    ----------
    out : optional
        Where to put them. The shards are then `numpy.array_split`'s of it, unless `counts` says otherwise.
    counts : optional
        Rows of each rank's shard. If neither is given the ranks first tell each other, in a `roll_call`.
    """
    mine = shard.shape[0] if shard.ndim else 1
    if counts is None:
        counts = cut(out.shape[0], comm.size) if out is not None else comm.roll_call(mine)
    result = _new(shard, sum(counts)) if out is None else out
    rows = math.prod(shard.shape[1:])
    if mine != counts[comm.rank] or math.prod(result.shape) != sum(counts) * rows:
        raise ValueError(
            f"rank {comm.rank} brings a shard of {mine} rows for an output of shape {tuple(result.shape)}, of which "
            f"{counts[comm.rank]} are its own: bring array_split's shard, or say counts="
        )
    source, array = flatten(shard), flatten(result)
    lengths = [count * rows for count in counts]
    name, function = find("all_gather", algorithm, array.nbytes, comm)
    agree(comm, ("all_gather", dtype_name(array), tuple(result.shape), tuple(counts), name))
    chunks = chunks_of(array, lengths)
    copy(chunks[comm.rank], source)
    if comm.size > 1:
        with comm.span("all_gather " + name, "collective", array.nbytes):
            function(source, array, lengths) if name == "native" else function(chunks, comm.internal)
    return result


def broadcast(buffer: Buffer, comm: Communicator, root: int = 0, algorithm: str = "auto") -> None:
    """Replace every rank's buffer by the root's, in place. Raises as `all_reduce`."""
    array = flatten(buffer)
    _check_root(root, comm)
    name, function = find("broadcast", algorithm, array.nbytes, comm)
    agree(comm, ("broadcast", dtype_name(array), len(array), f"root={root}", name))
    if comm.size > 1:
        with comm.span("broadcast " + name, "collective", array.nbytes):
            function(array, root) if name == "native" else function(array, comm.internal, root)


def reduce(buffer: Buffer, comm: Communicator, root: int = 0, op: str = "sum", algorithm: str = "auto") -> None:
    """Replace the root's buffer by the reduction of all; the others keep theirs. Raises as `all_reduce`."""
    array = flatten(buffer)
    _check_root(root, comm)
    combine = reduction(op, array)
    name, function = find("reduce", algorithm, array.nbytes, comm)
    agree(comm, ("reduce", dtype_name(array), len(array), op, f"root={root}", name))
    if comm.size > 1:
        with comm.span("reduce " + name, "collective", array.nbytes):
            function(array, root, op) if name == "native" else function(array, comm.internal, root, combine)
    if comm.rank == root:
        finish(op, array, comm.size)


def gather(
    shard: Buffer, comm: Communicator, root: int = 0, algorithm: str = "auto", counts: Sequence[int] | None = None
) -> Buffer | None:
    """Return all ranks' shards, along the first axis, on the root and None elsewhere. Raises as `all_reduce`.

    `counts` are the rows of each rank's shard; without them the ranks first tell each other.
    """
    _check_root(root, comm)
    counts = comm.roll_call(shard.shape[0] if shard.ndim else 1) if counts is None else counts
    source = flatten(shard)
    lengths = [count * math.prod(shard.shape[1:]) for count in counts]
    name, function = find("gather", algorithm, sum(lengths) * source.itemsize, comm)
    agree(comm, ("gather", dtype_name(source), tuple(counts), f"root={root}", name))
    result = _new(shard, sum(counts)) if comm.rank == root else None
    array = None if result is None else flatten(result)
    chunks = None if array is None else chunks_of(array, lengths)
    with comm.span("gather " + name, "collective", source.nbytes):
        if comm.size == 1:
            copy(array, source)
        elif name == "native":
            function(source, array, lengths, root)
        else:
            function(source, chunks, comm.internal, root, *([lengths] if name == "tree" else []))
    return result


def scatter(full: Buffer | None, comm: Communicator, root: int = 0, algorithm: str = "auto") -> Buffer:
    """Return shard `comm.rank` of the root's `full`; the other ranks pass None. Raises as `all_reduce`.

    The root first tells its shape and dtype, in a `roll_call`.
    """
    _check_root(root, comm)
    if comm.rank == root and full is None:
        raise ValueError(f"rank {root} is the root of this scatter: it must bring the full buffer, not None")
    array = flatten(full) if comm.rank == root and full is not None else None
    described = None if array is None else (tuple(full.shape), dtype_name(array), is_tensor(full))  # type: ignore[union-attr]
    shape, dtype, tensor = comm.roll_call(described)[root]
    template = _template(shape, dtype, tensor) if full is None else full
    rows, counts = _shards(template, comm.size)
    shard: Buffer = _new(template, rows[comm.rank])
    out = flatten(shard)
    name, function = find("scatter", algorithm, sum(counts) * out.itemsize, comm)
    agree(comm, ("scatter", shape, dtype, f"root={root}", name))
    chunks = None if array is None else chunks_of(array, counts)
    with comm.span("scatter " + name, "collective", out.nbytes):
        if comm.size == 1:
            copy(out, array)
        elif name == "native":
            function(array, out, counts, root)
        else:
            function(chunks, out, comm.internal, root, *([counts] if name == "tree" else []))
    return shard


def all_to_all(
    full: Buffer,
    comm: Communicator,
    algorithm: str = "auto",
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
) -> Buffer:
    """Send chunk j of `full` to rank j; return the chunks that came, by sender. Raises as `all_reduce`.

    Without counts (in rows) the chunks are `numpy.array_split`'s, and `full` is of one size on all ranks; with only
    `send_counts` the ranks first tell each other what to expect.
    """
    array = flatten(full)
    rows, row = full.shape[0], math.prod(full.shape[1:])
    if send_counts is None:
        send_counts = cut(rows, comm.size)
        receive_counts = [send_counts[comm.rank]] * comm.size
    if receive_counts is None:
        receive_counts = [counts[comm.rank] for counts in comm.roll_call(list(send_counts))]
    if sum(send_counts) != rows or len(send_counts) != comm.size:
        raise ValueError(f"send_counts={list(send_counts)} must be {comm.size} counts that add up to the {rows} rows")
    result: Buffer = _new(full, sum(receive_counts))
    arriving = flatten(result)
    leaving_lengths, arriving_lengths = [n * row for n in send_counts], [n * row for n in receive_counts]
    name, function = find("all_to_all", algorithm, array.nbytes, comm)
    agree(comm, ("all_to_all", dtype_name(array), row, name))
    with comm.span("all_to_all " + name, "collective", array.nbytes):
        if name == "native":
            function(array, leaving_lengths, arriving, arriving_lengths)
        else:
            function(chunks_of(array, leaving_lengths), chunks_of(arriving, arriving_lengths), comm.internal)
    return result


def _check_root(root: int, comm: Communicator) -> None:
    if not 0 <= root < comm.size:
        raise ValueError(f"root={root} is not a rank: there are {comm.size}, numbered 0 to {comm.size - 1}")


def _shards(full: Any, ranks: int) -> tuple[list[int], list[int]]:
    """Return the rows of each rank's shard, and their elements."""
    rows = cut(full.shape[0] if full.ndim else 1, ranks)
    return rows, [count * math.prod(full.shape[1:]) for count in rows]


def _new(like: Any, rows: int) -> Any:
    """Return an uninitialised buffer of `rows` rows, otherwise like `like`."""
    shape = (rows, *like.shape[1:])
    return like.new_empty(shape) if is_tensor(like) else np.empty(shape, like.dtype)


def _template(shape: tuple[int, ...], dtype: str, tensor: bool) -> Buffer:
    """Return an empty buffer of the root's kind: what it would be here."""
    if not tensor:
        return np.broadcast_to(np.empty((), dtype), shape)
    import torch

    return torch.empty((), dtype=getattr(torch, dtype)).expand(shape)


__all__: list[str] = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

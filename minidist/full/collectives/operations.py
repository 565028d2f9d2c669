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

Shards are those of `numpy.array_split`: parts along an axis, as equal as possible, longer
ones first; or, where `counts` says so, of so many rows. All ranks must call the same collectives in
the same order. Every rank gets the same bits. Each algorithm's file states its cost;
`algorithms("broadcast")` says which an operation has. A NaN stays one in `max` and `min`, but
`native` leaves that to its engine: MPI and gloo may lose it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.full.collectives.choose import find, least
from minidist.full.collectives.fast import cut
from minidist.full.collectives.reduction import finish, reduction
from minidist.full.comm.agree import agree
from minidist.full.comm.buffers import (
    Array,
    Buffer,
    Chunks,
    Kind,
    address,
    described,
    device_name,
    dtype_name,
    flatten,
    moved,
    new_rows,
    template,
)
from minidist.full.comm.communicator import Communicator
from minidist.full.comm.errors import whole


def all_reduce(
    buffer: Buffer, comm: Communicator, op: str = "sum", algorithm: str = "auto"
) -> None:
    """Replace every rank's buffer by the reduction of all buffers, in place.

    Parameters
    ----------
    buffer
        Contiguous, of the same size and dtype on every rank; its shape does not matter.
    op : {"sum", "mean", "max", "min", "prod", "and", "or", "xor"}
    algorithm : str
        `auto`, `ring`, `recursive`, `halving_doubling`, `tree`, `central`, `hierarchical`, `shared`
        or `native`.

    Raises
    ------
    ValueError, TypeError
        Before anything is sent, for an invalid buffer, operation or algorithm.
    MismatchError
        If the ranks' calls differ. Debug mode finds every difference; otherwise only different
        sizes show.
    """
    array = flatten(buffer, writable=True)
    combine = comm.computing(reduction(op, array))
    if comm.ledger.debug:  # asked here, too: naming what is compared takes time
        agree(comm, "all_reduce", dtype_name(array), len(array), op, algorithm)
    _run("all_reduce", comm, algorithm, array, (array, comm.internal, combine))
    if op == "mean":
        comm.computing(finish)(op, array, comm.size)


def reduce_scatter(
    full: Kind,
    comm: Communicator,
    op: str = "sum",
    algorithm: str = "auto",
    counts: Sequence[int] | None = None,
    out: Kind | None = None,
    dim: int = 0,
) -> Kind:
    """Return shard `comm.rank` of the reduction of all ranks' `full`; `full` is unchanged. Raises
    as `all_reduce`.

    Parameters
    ----------
    dim : int
        The axis along which rows are counted. Another one than the first costs two copies.
    counts : optional
        Rows of each rank's shard, the same on every rank; they may be 0. Without them the shards
        are those of `numpy.array_split`.
    out : optional
        Receives the shard: memory that is no part of `full`.
    """
    if dim:
        return _along(dim, reduce_scatter, full, out, comm, op, algorithm, counts)
    array = flatten(full)
    combine = comm.computing(reduction(op, array))
    if counts is not None:
        _check_counts("counts", counts, comm)
        if sum(counts) != _rows(full):
            fix = "give every row to one rank"
            raise ValueError(
                f"counts={list(counts)} add up to {sum(counts)}, but there are {_rows(full)} "
                f"rows: {fix}"
            )
    agree(comm, "reduce_scatter", dtype_name(array), full.shape, op, algorithm, counts=counts)
    rows, lengths = _shards(full, comm.size, counts)
    shard: Kind = new_rows(full, rows[comm.rank]) if out is None else out
    reduced = flatten(shard, writable=True)
    if out is not None:
        _check_room(reduced, array, lengths[comm.rank], comm)
    if comm.size == 1:
        comm.copy(reduced, array)
    _run(
        "reduce_scatter",
        comm,
        algorithm,
        array,
        (Chunks(array, lengths), reduced, comm.internal, combine),
        lengths,
    )
    if op == "mean":
        comm.computing(finish)(op, reduced, comm.size)
    return shard


def all_gather(
    shard: Kind,
    comm: Communicator,
    out: Kind | None = None,
    algorithm: str = "auto",
    counts: Sequence[int] | None = None,
    dim: int = 0,
) -> Kind:
    """Return all ranks' shards, one after the other along axis `dim`. Raises as `all_reduce`.

    Parameters
    ----------
    out : optional
        Receives the shards. They are then its `numpy.array_split` parts, unless `counts` says
        otherwise.
    counts : optional
        Rows of each rank's shard. Without `out` and `counts`, the ranks first exchange them in an
        `all_gather_object`.
    """
    if dim:
        return _along(dim, all_gather, shard, out, comm, None, algorithm, counts)
    source, mine, rows = flatten(shard), _rows(shard), math.prod(shard.shape[1:])
    room = None if out is None else tuple(out.shape)
    told = {"row": shard.shape[1:], "out": room, "counts": counts}
    agree(comm, "all_gather", dtype_name(source), algorithm, **told)
    if counts is None:
        counts = comm.all_gather_object(mine) if out is None else cut(_rows(out), comm.size)
    _check_counts("counts", counts, comm)
    result = new_rows(shard, sum(counts)) if out is None else out
    array = flatten(result, writable=True)
    if (
        mine != counts[comm.rank]
        or len(array) != sum(counts) * rows
        or dtype_name(array) != dtype_name(source)
    ):
        brought = f"rank {comm.rank} brings a {dtype_name(source)} shard of {mine} rows"
        place = (
            f"a {dtype_name(array)} output of shape {tuple(result.shape)}, of which "
            f"{counts[comm.rank]} are its own"
        )
        raise ValueError(f"{brought} for {place}: bring array_split's shard, or say counts=")
    lengths = [count * rows for count in counts]
    chunks = Chunks(array, lengths, brought=source)
    comm.copy(chunks[comm.rank], source)
    _run("all_gather", comm, algorithm, array, (chunks, comm.internal), lengths)
    return result


def broadcast(buffer: Buffer, comm: Communicator, root: int = 0, algorithm: str = "auto") -> None:
    """Replace every rank's buffer by the root's, in place. Raises as `all_reduce`."""
    check_root(root, comm)
    array = flatten(buffer, writable=comm.rank != root)
    agree(comm, "broadcast", dtype_name(array), len(array), algorithm, root=root)
    _run("broadcast", comm, algorithm, array, (array, comm.internal, root), root=root)


def reduce(
    buffer: Buffer, comm: Communicator, root: int = 0, op: str = "sum", algorithm: str = "auto"
) -> None:
    """Replace the root's buffer by the reduction of all; other buffers are unchanged. Raises as
    `all_reduce`.
    """
    check_root(root, comm)
    array = flatten(buffer, writable=comm.rank == root)
    combine = comm.computing(reduction(op, array))
    agree(comm, "reduce", dtype_name(array), len(array), op, algorithm, root=root)
    _run("reduce", comm, algorithm, array, (array, comm.internal, root, combine), root=root)
    if comm.rank == root:
        comm.computing(finish)(op, array, comm.size)


def gather(
    shard: Kind,
    comm: Communicator,
    root: int = 0,
    algorithm: str = "auto",
    counts: Sequence[int] | None = None,
) -> Kind | None:
    """Return all ranks' shards, along the first axis, on the root and None elsewhere. Raises as
    `all_reduce`.

    `counts` are the rows of each rank's shard; without them an `all_gather_object` comes first.
    """
    check_root(root, comm)
    source, mine = flatten(shard), _rows(shard)
    agree(
        comm, "gather", dtype_name(source), algorithm, row=shard.shape[1:], counts=counts, root=root
    )
    counts = comm.all_gather_object(mine) if counts is None else counts
    _check_counts("counts", counts, comm)
    if mine != counts[comm.rank]:
        raise ValueError(
            f"rank {comm.rank} brings a shard of {mine} rows, but counts={list(counts)} says "
            "otherwise"
        )
    lengths = [count * math.prod(shard.shape[1:]) for count in counts]
    result = new_rows(shard, sum(counts)) if comm.rank == root else None
    chunks = None if result is None else Chunks(flatten(result), lengths)
    _run(
        "gather",
        comm,
        algorithm,
        source,
        (source, chunks, comm.internal, root, lengths),
        lengths,
        root,
    )
    return result


def scatter(full: Kind | None, comm: Communicator, root: int = 0, algorithm: str = "auto") -> Kind:
    """Return shard `comm.rank` of the root's `full`; the other ranks pass None. Raises as
    `all_reduce`.

    The root first announces its shape and dtype in an `all_gather_object`.
    """
    check_root(root, comm)
    if comm.rank == root and full is None:
        raise ValueError(
            f"rank {root} is the root of this scatter: it must bring the full buffer, not None"
        )
    array = flatten(full) if comm.rank == root and full is not None else None
    agree(comm, "scatter", algorithm, root=root)
    told = comm.all_gather_object(described(full) if comm.rank == root else None)
    like = template(*told[root])
    rows, counts = _shards(like, comm.size)
    shard: Kind = new_rows(like, rows[comm.rank])
    out = flatten(shard)
    chunks = None if array is None else Chunks(array, counts)
    _run("scatter", comm, algorithm, out, (chunks, out, comm.internal, root, counts), counts, root)
    return shard


def all_to_all(
    full: Kind,
    comm: Communicator,
    algorithm: str = "auto",
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
) -> Kind:
    """Send chunk j of `full` to rank j; return the chunks that arrive, by sender. Raises as
    `all_reduce`.

    The counts are in rows: `receive_counts[r]` are those that come from rank r. Without them the
    chunks are those of `numpy.array_split`, and `full` must have the same size on all ranks. With
    `send_counts` alone, the ranks first exchange their counts in an `all_gather_object`.
    """
    array = flatten(full)
    rows, row = _rows(full), math.prod(full.shape[1:])
    sent = rows if send_counts is None else "counted"
    received = "told" if receive_counts is None else "counted"
    named = {"row": full.shape[1:], "sent": sent, "received": received}
    agree(comm, "all_to_all", dtype_name(array), algorithm, **named)
    if send_counts is None:
        if receive_counts is not None:
            said = f"receive_counts={list(receive_counts)} says what arrives"
            raise ValueError(f"{said}, but nothing what leaves: say send_counts= as well")
        send_counts = cut(rows, comm.size)
        receive_counts = [send_counts[comm.rank]] * comm.size
    if receive_counts is None:
        receive_counts = [counts[comm.rank] for counts in comm.all_gather_object(list(send_counts))]
    _check_counts("send_counts", send_counts, comm)
    _check_counts("receive_counts", receive_counts, comm)
    if sum(send_counts) != rows or send_counts[comm.rank] != receive_counts[comm.rank]:
        kept = (
            f"what rank {comm.rank} keeps must be the same in receive_counts={list(receive_counts)}"
        )
        raise ValueError(
            f"send_counts={list(send_counts)} must add up to the {rows} rows, and {kept}"
        )
    result: Kind = new_rows(full, sum(receive_counts))
    leaving = Chunks(array, [count * row for count in send_counts])
    arriving = Chunks(flatten(result), [count * row for count in receive_counts])
    _run("all_to_all", comm, algorithm, array, (leaving, arriving, comm.internal), leaving.lengths)
    return result


def _along(
    dim: int, collective: Callable[..., Kind], buffer: Kind, out: object, *arguments: Any
) -> Kind:
    """Call a collective of the first axis along another one."""
    if out is not None:
        raise ValueError(f"out= is for dim=0: along dim={dim} the shards do not lie in one piece")
    result: Kind = moved(collective(moved(buffer, dim, 0), *arguments), 0, dim)
    return result


def _run(
    what: str,
    comm: Communicator,
    algorithm: str,
    array: Array,
    call: Any,
    lengths: Sequence[int] = (),
    root: int = 0,
) -> None:
    """Call an algorithm with the arguments `call`, in a span of `array`. `lengths` are those of the
    ranks' shards.

    Where nothing has to move on a single rank, nothing is called.
    """
    everything = sum(lengths) if lengths else len(array)
    name, function = find(what, algorithm, everything * array.itemsize, comm)
    if comm.size == 1 and what not in ("gather", "scatter", "all_to_all"):
        return
    sent = None
    if name == "native":
        own = (lengths or cut(everything, comm.size))[comm.rank]
        behind = (comm.rank - root) % comm.size
        sent = least(what, everything, own, comm.size, behind) * array.itemsize
    comm.carry_out(what, name, array.nbytes, sent, function, call)


def check_root(root: int, comm: Communicator) -> None:
    """Refuse a root that is no rank."""
    last = comm.size - 1
    if not 0 <= whole("root", root) <= last:
        raise ValueError(f"root={root} is not a rank: there are {last + 1}, numbered 0 to {last}")


def _check_counts(name: str, counts: Sequence[int], comm: Communicator) -> None:
    whole_numbers = isinstance(sum(counts), int | np.integer)
    if len(counts) != comm.size or min(counts) < 0 or not whole_numbers:
        raise ValueError(
            f"{name}={list(counts)} must be {comm.size} numbers of rows, one for each rank"
        )


def _check_room(room: Array, full: Array, length: int, comm: Communicator) -> None:
    """Raise ValueError unless `room` is like `length` elements of `full`, and lies elsewhere."""
    kinds = [f"{dtype_name(each)} on {device_name(each)}" for each in (room, full)]
    if len(room) != length or kinds[0] != kinds[1]:
        raise ValueError(
            f"rank {comm.rank} brings an output of {len(room)} elements ({kinds[0]}) for a shard "
            f"of {length} ({kinds[1]}): bring one like the shard"
        )
    on_meta = device_name(full) == "meta"
    if not on_meta and -room.nbytes < address(room) - address(full) < full.nbytes:
        raise ValueError(
            f"rank {comm.rank} brings an output that is a part of the buffer to be reduced, which is "
            "still read while the output is written: bring other memory"
        )


def _rows(buffer: Any) -> int:
    return int(buffer.shape[0]) if buffer.ndim else 1


def _shards(
    full: Any, ranks: int, counts: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Return the rows of each rank's shard, and their elements."""
    rows = cut(_rows(full), ranks) if counts is None else [*counts]
    return rows, [count * math.prod(full.shape[1:]) for count in rows]

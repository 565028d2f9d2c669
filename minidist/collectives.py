"""Collectives: functions that all ranks of a group call together, built from messages of two.

    before, 3 ranks      all_reduce         reduce_scatter   all_gather   broadcast   all_to_all
    rank 0   a0 a1 a2    s0 s1 s2           s0               a b c        a0 a1 a2    a0 b0 c0
    rank 1   b0 b1 b2    s0 s1 s2              s1            a b c        a0 a1 a2    a1 b1 c1
    rank 2   c0 c1 c2    s0 s1 s2                 s2         a b c        a0 a1 a2    a2 b2 c2

    algorithm      of                               steps        bytes that a rank sends of n
    ring           all_reduce                       2 (P - 1)    2 (P - 1)/P n
                   reduce_scatter, all_gather       P - 1        (P - 1)/P n
    recursive      all_reduce, by doubling          log2 P       log2(P) n
                   reduce_scatter, by halving       log2 P       (P - 1)/P n
    tree           broadcast, reduce, all_reduce    log2 P       at most log2(P) n, by the root
    naive          all_reduce                       2 (P - 1)    (P - 1) n by rank 0, n by the others
    pairwise       all_to_all                       P - 1        (P - 1)/P n
    hierarchical   all_reduce                       see there    across nodes 2 (N - 1)/N n/L

A ring suits large buffers, the logarithms suit small ones. Any number of ranks and any size may
come, and every rank ends with the same bits. (Thakur, Rabenseifner & Gropp 2005; Chan et al. 2007.)
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from minidist.comm import Communicator, empty_like
from minidist.ring import Reduce, ring_all_gather, ring_all_reduce, ring_reduce_scatter


def all_reduce(buffer: Any, comm: Communicator, op: str = "sum", algorithm: str = "ring") -> None:
    """Replace every rank's `buffer` by the sum of all of them, element by element.

    `op` is "sum", "mean" (the sum over P), "max" or "min"; `algorithm` is one of the table, but for
    `hierarchical_all_reduce`, which takes two communicators.
    """
    add = reduction(op)
    if algorithm == "ring":
        ring_all_reduce(split(buffer, comm.size), comm, add)
    elif algorithm == "recursive":
        doubling_all_reduce(buffer, comm, add)
    elif algorithm == "tree":
        tree_reduce(buffer, comm, 0, add)
        broadcast(buffer, comm)
    elif algorithm == "naive":
        naive_all_reduce(buffer, comm, add)
    else:
        raise ValueError(f"algorithm={algorithm!r}: use ring, recursive, tree or naive")
    if op == "mean":
        buffer /= comm.size


def reduce_scatter(
    buffer: Any, comm: Communicator, op: str = "sum", algorithm: str = "ring"
) -> Any:
    """Return chunk number `comm.rank` of the sum of all buffers, flat; `split` says which it is."""
    power_of_two = comm.size & (comm.size - 1) == 0
    if algorithm == "recursive" and power_of_two:
        shard = halving_reduce_scatter(flat(buffer), comm, reduction(op))
    else:
        shard = ring_reduce_scatter(split(buffer, comm.size), comm, reduction(op))
    if comm.size == 1:
        shard = copy(shard)  # never a view of the caller's buffer
    if op == "mean":
        shard /= comm.size
    return shard


def all_gather(shard: Any, comm: Communicator, out: Any = None) -> Any:
    """Return all ranks' shards one after the other, flat [n]; by a ring.

    Shards of different lengths need an `out`, in which rank r's shard is chunk r of `split`.
    """
    if out is None:
        out = empty(comm.size * len(flat(shard)), like=shard)
    chunks = split(out, comm.size)
    chunks[comm.rank][:] = flat(shard)
    ring_all_gather(chunks, comm)
    return out


def broadcast(buffer: Any, comm: Communicator, root: int = 0) -> None:
    """Replace every rank's `buffer` by that of `root`, along a binomial tree.

    8 ranks    step 1    0 ─▶ 4         step 2    0 ─▶ 2, 4 ─▶ 6         step 3    0 ─▶ 1, 2 ─▶ 3, ...
    """
    place = (comm.rank - root) % comm.size  # the root stands at place 0
    for distance in reversed(powers_of_two(comm.size)):
        if place % (2 * distance) == 0 and place + distance < comm.size:
            comm.send(buffer, (comm.rank + distance) % comm.size)
        elif place % (2 * distance) == distance:
            comm.recv(buffer, (comm.rank - distance) % comm.size)


def reduce(buffer: Any, comm: Communicator, root: int = 0, op: str = "sum") -> None:
    """Replace the buffer of `root` by the sum of all, along the tree of `broadcast` backwards.

    The other ranks' buffers hold partial sums afterwards.
    """
    tree_reduce(buffer, comm, root, reduction(op))
    if op == "mean" and comm.rank == root:
        buffer /= comm.size


def gather(shard: Any, comm: Communicator, root: int = 0, out: Any = None) -> Any:
    """Return on `root` what `all_gather` returns everywhere, and None elsewhere: P - 1 messages."""
    if comm.rank != root:
        comm.send(shard, root)
        return None
    if out is None:
        out = empty(comm.size * len(flat(shard)), like=shard)
    for rank, chunk in enumerate(split(out, comm.size)):
        if rank == root:
            chunk[:] = flat(shard)
        else:
            comm.recv(chunk, rank)
    return out


def scatter(shard: Any, comm: Communicator, root: int = 0, buffer: Any = None) -> None:
    """Fill every rank's `shard` with its chunk of the `buffer` of `root`: P - 1 messages."""
    if comm.rank != root:
        comm.recv(shard, root)
        return
    for rank, chunk in enumerate(split(buffer, comm.size)):
        if rank == root:
            flat(shard)[:] = chunk
        else:
            comm.send(chunk, rank)


def all_to_all(
    buffer: Any,
    comm: Communicator,
    leaving: Sequence[int] | None = None,
    arriving: Sequence[int] | None = None,
) -> Any:
    """Send chunk j to rank j; return what all ranks have sent here, by sender, flat.

    In step s a rank sends to the rank s after it and receives from the rank s before it, so each
    link carries one message at a time. `leaving` and `arriving` are elements for each rank, and
    from each; by default all are n/P.
    """
    even = [len(flat(buffer)) // comm.size] * comm.size
    leaving, arriving = leaving or even, arriving or even
    received = empty(sum(arriving), like=buffer)
    chunks, places = cut(flat(buffer), leaving), cut(received, arriving)
    places[comm.rank][:] = chunks[comm.rank]
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        comm.exchange(chunks[to], to, places[source], source)
    return received


def all_gather_object(value: Any, comm: Communicator) -> list[Any]:
    """Return every rank's `value`, by rank: small Python objects, which are pickled."""
    text = np.frombuffer(pickle.dumps(value), np.uint8)
    lengths = all_gather(np.array([len(text)]), comm).tolist()
    chunks = cut(np.empty(sum(lengths), np.uint8), lengths)
    chunks[comm.rank][:] = text
    ring_all_gather(chunks, comm)
    return [pickle.loads(chunk.tobytes()) for chunk in chunks]


# ---------------------------------------------------------------- other shapes than the ring


def naive_all_reduce(buffer: Any, comm: Communicator, add: Reduce) -> None:
    """Send everything to rank 0, which sends the sum back: its link carries all of it."""
    if comm.rank:
        comm.send(buffer, 0)
        comm.recv(buffer, 0)
        return
    arriving = empty_like(buffer)
    for rank in range(1, comm.size):
        comm.recv(arriving, rank)
        add(buffer, arriving)
    for rank in range(1, comm.size):
        comm.send(buffer, rank)


def tree_reduce(buffer: Any, comm: Communicator, root: int, add: Reduce) -> None:
    """Sum along a binomial tree, from the leaves to the root: log2 P steps."""
    arriving, place = empty_like(buffer), (comm.rank - root) % comm.size
    for distance in powers_of_two(comm.size):
        if place % (2 * distance) == distance:
            comm.send(buffer, (comm.rank - distance) % comm.size)
        elif place % (2 * distance) == 0 and place + distance < comm.size:
            comm.recv(arriving, (comm.rank + distance) % comm.size)
            add(buffer, arriving)


def doubling_all_reduce(buffer: Any, comm: Communicator, add: Reduce) -> None:
    """Exchange sums with the rank that differs in one bit, bit after bit: log2 P steps.

        4 ranks    step 1    0 ◀─▶ 1, 2 ◀─▶ 3         step 2    0 ◀─▶ 2, 1 ◀─▶ 3

    After step k, 2^k ranks hold the same sum. The same bits, too: a + b = b + a. Ranks beyond the
    largest power of two hand their buffer to a partner first, and are given the result.
    """
    inner = powers_of_two(comm.size + 1)[-1]
    arriving, extra = empty_like(buffer), comm.size - inner
    if comm.rank >= inner:
        comm.send(buffer, comm.rank - inner)
        comm.recv(buffer, comm.rank - inner)
        return
    if comm.rank < extra:
        comm.recv(arriving, comm.rank + inner)
        add(buffer, arriving)
    for distance in powers_of_two(inner):
        partner = comm.rank ^ distance
        comm.exchange(buffer, partner, arriving, partner)
        add(buffer, arriving)
    if comm.rank < extra:
        comm.send(buffer, comm.rank + inner)


def halving_reduce_scatter(array: Any, comm: Communicator, add: Reduce) -> Any:
    """Send half of the chunks to a partner, then half of that half, and so on; P is a power of two.

    8 ranks    0 keeps 0-3 and sends 4-7 to 4;  keeps 0-1, sends 2-3 to 2;  keeps 0, sends 1 to 1
    """
    sums = copy(array)
    starts = [0, *accumulate(len(chunk) for chunk in split(array, comm.size))]
    first, last = 0, comm.size  # the chunks that are left
    while last - first > 1:
        middle = (first + last) // 2
        lower, upper = (first, middle), (middle, last)
        in_lower = comm.rank < middle
        kept, given = (lower, upper) if in_lower else (upper, lower)
        partner = comm.rank + (middle - first if in_lower else first - middle)
        into = sums[starts[kept[0]] : starts[kept[1]]]
        arriving = empty_like(into)
        comm.exchange(sums[starts[given[0]] : starts[given[1]]], partner, arriving, partner)
        add(into, arriving)
        first, last = kept
    return copy(sums[starts[first] : starts[last]])


def hierarchical_all_reduce(
    buffer: Any, inside: Communicator, across: Communicator, op: str = "sum"
) -> None:
    """All-reduce so that little crosses the slow links between nodes.

        reduce-scatter inside the node ─▶ all-reduce of my chunk across ─▶ all-gather inside

    `inside` are the L ranks of this node, and `across` the ranks at this one's place on all N nodes.
    Each rank sends 2 (N - 1)/N n/L bytes across nodes, where a ring of all sends nearly 2 n.
    """
    shard = reduce_scatter(buffer, inside, op)
    all_reduce(shard, across, op)
    all_gather(shard, inside, out=buffer)


# ---------------------------------------------------------------- buffers of either library


def flat(buffer: Any) -> Any:
    """View a buffer as one dimension."""
    return buffer.reshape(-1)


def split(buffer: Any, parts: int) -> list[Any]:
    """View a buffer as `parts` flat chunks; the first n % parts have one element more."""
    array = flat(buffer)
    cut_evenly = np.array_split if isinstance(array, np.ndarray) else type(array).tensor_split
    return list(cut_evenly(array, parts))


def cut(array: Any, lengths: Sequence[int]) -> list[Any]:
    """View a flat buffer as chunks of these lengths."""
    ends = list(accumulate(lengths))
    return [array[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def copy(array: Any) -> Any:
    """Return a copy in memory of its own."""
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def empty(length: int, like: Any) -> Any:
    """Return a flat buffer of the same library, dtype and device."""
    numpy = isinstance(like, np.ndarray)
    return np.empty(length, like.dtype) if numpy else like.new_empty(length)


def reduction(op: str) -> Reduce:
    """Return what combines two buffers in place, into the first."""
    if op in ("sum", "mean"):
        return operator.iadd
    if op not in ("max", "min"):
        raise ValueError(f"op={op!r} is not known: use sum, mean, max or min")

    def keep(into: Any, other: Any) -> None:
        larger = other > into if op == "max" else other < into
        into[larger] = other[larger]

    return keep


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4 ... below `limit`."""
    return [1 << bit for bit in range((limit - 1).bit_length())]

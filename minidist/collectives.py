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
    tree           broadcast, reduce                log2 P       at most log2(P) n, by the root
                   all_reduce                       2 log2 P     at most log2(P) n, by the root
    naive          all_reduce                       2 (P - 1)    (P - 1) n by rank 0, n by the others
    pairwise       all_to_all                       P - 1        (P - 1)/P n
    hierarchical   all_reduce, L ranks a node       2 (L+N - 2)  across N nodes 2 (N - 1)/N n/L

A ring suits large buffers, trees and halving suit small ones. Every rank ends with the same bits.
If P is not a power of two, recursive is a ring. (Thakur et al. 2005; Chan et al. 2007.)
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from minidist.comm import Communicator, copy, empty_like, flat
from minidist.ring import Reduce, ring_all_gather, ring_all_reduce, ring_reduce_scatter


def all_reduce(buffer: Any, comm: Communicator, op: str = "sum", algorithm: str = "ring") -> None:
    """Replace every rank's `buffer` by the sum (mean, max, min) of all, element by element."""
    add, power_of_two = reduction(op), comm.size.bit_count() == 1
    if algorithm in ("tree", "naive"):
        tree = binomial_tree(comm, 0) if algorithm == "tree" else star(comm)
        sum_up(buffer, comm, tree, add)
        send_down(buffer, comm, tree)
    elif algorithm == "recursive" and power_of_two:
        doubling_all_reduce(buffer, comm, add)
    elif algorithm in ("ring", "recursive"):
        ring_all_reduce(split(buffer, comm.size), comm, add)
    else:
        raise ValueError(f"algorithm={algorithm!r}: use ring, recursive, tree or naive")
    if op == "mean":
        buffer /= comm.size


def reduce_scatter(
    buffer: Any, comm: Communicator, op: str = "sum", algorithm: str = "ring"
) -> Any:
    """Return chunk number `comm.rank` of the sum of all buffers, flat; `split` says which it is."""
    add, power_of_two = reduction(op), comm.size.bit_count() == 1
    if comm.size == 1:
        shard = copy(flat(buffer))
    elif algorithm == "recursive" and power_of_two:
        shard = halving_reduce_scatter(buffer, comm, add)
    elif algorithm in ("ring", "recursive"):
        shard = ring_reduce_scatter(split(buffer, comm.size), comm, add)
    else:
        raise ValueError(f"algorithm={algorithm!r}: use ring or recursive")
    if op == "mean":
        shard /= comm.size
    return shard


def all_gather(shard: Any, comm: Communicator, out: Any = None) -> Any:
    """Return all shards, flat, by a ring; if they are a `split` in unequal parts, pass an `out`."""
    own = flat(shard)
    if out is None:
        out = empty_like(own, comm.size * len(own))
    chunks = split(out, comm.size)
    chunks[comm.rank][:] = own
    ring_all_gather(chunks, comm)
    return out


def broadcast(buffer: Any, comm: Communicator, root: int = 0) -> None:
    """Replace every rank's `buffer` by that of `root`, along a binomial tree."""
    send_down(buffer, comm, binomial_tree(comm, root))


def reduce(buffer: Any, comm: Communicator, root: int = 0, op: str = "sum") -> None:
    """Replace the buffer of `root` by the sum of all; the others hold partial sums afterwards."""
    sum_up(buffer, comm, binomial_tree(comm, root), reduction(op))
    if op == "mean" and comm.rank == root:
        buffer /= comm.size


def gather(shard: Any, comm: Communicator, root: int = 0, out: Any = None) -> Any:
    """Return on `root` what `all_gather` returns everywhere, and None elsewhere: P - 1 messages."""
    own = flat(shard)
    if comm.rank != root:
        comm.send(own, root)
        return None
    if out is None:
        out = empty_like(own, comm.size * len(own))
    for rank, chunk in enumerate(split(out, comm.size)):
        if rank == root:
            chunk[:] = own
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

    `leaving` and `arriving` are elements to and from each rank, by default as `split` cuts.
    """
    rank, size = comm.rank, comm.size
    chunks = cut(flat(buffer), leaving) if leaving else split(buffer, size)
    lengths = arriving or [len(chunks[rank])] * size
    received = empty_like(buffer, sum(lengths))
    places = cut(received, lengths)
    places[rank][:] = chunks[rank]
    for step in range(1, size):  # In each step, a link carries one message.
        to, source = (rank + step) % size, (rank - step) % size
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


Tree: TypeAlias = tuple[int | None, list[int]]  # of each rank: its parent, if any, and children


def star(comm: Communicator) -> Tree:
    """Return the tree in which rank 0 is everyone's parent: its link carries everything."""
    return (0, []) if comm.rank else (None, list(range(1, comm.size)))


def binomial_tree(comm: Communicator, root: int) -> Tree:
    """Return the tree in which, step by step, every rank that has the data sends it to one more.

    8 ranks    step 1    0 ─▶ 4         step 2    0 ─▶ 2, 4 ─▶ 6         step 3    0 ─▶ 1, 2 ─▶ 3, ...
    """
    rank, size = comm.rank, comm.size
    place = (rank - root) % size  # the root stands at place 0
    lowest_bit = place & -place or size  # The parent is at the place without it: 111, 110, 100, 0.
    parent = (rank - lowest_bit) % size if place else None
    children_at = powers_of_two(min(lowest_bit, size - place))
    return parent, [(rank + distance) % size for distance in children_at]


def sum_up(buffer: Any, comm: Communicator, tree: Tree, add: Reduce) -> None:
    """Sum from the leaves to the root: a rank adds what its children send, then sends the sum."""
    parent, children = tree
    arriving = empty_like(buffer)
    for child in children:
        comm.recv(arriving, child)
        add(buffer, arriving)
    if parent is not None:
        comm.send(buffer, parent)


def send_down(buffer: Any, comm: Communicator, tree: Tree) -> None:
    """Copy from the root to the leaves, into the largest subtree first."""
    parent, children = tree
    if parent is not None:
        comm.recv(buffer, parent)
    for child in reversed(children):
        comm.send(buffer, child)


def doubling_all_reduce(buffer: Any, comm: Communicator, add: Reduce) -> None:
    """Exchange sums with the rank that differs in one bit. After step k, 2^k ranks have the same.

    4 ranks    step 1    0 ◀─▶ 1, 2 ◀─▶ 3         step 2    0 ◀─▶ 2, 1 ◀─▶ 3
    """
    arriving = empty_like(buffer)
    for distance in powers_of_two(comm.size):
        partner = comm.rank ^ distance
        comm.exchange(buffer, partner, arriving, partner)
        add(buffer, arriving)  # the same bits on both: a + b = b + a


def halving_reduce_scatter(buffer: Any, comm: Communicator, add: Reduce) -> Any:
    """Send half of the chunks to a partner, then half of that half, and so on: log2 P steps.

    8 ranks    0 keeps 0-3 and sends 4-7 to 4;  keeps 0-1, sends 2-3 to 2;  keeps 0, sends 1 to 1
    """
    sums = copy(flat(buffer))
    starts = [0, *accumulate(len(chunk) for chunk in split(sums, comm.size))]

    def block(rank: int, count: int) -> Any:
        first = rank // count * count  # The block of `count` chunks with chunk `rank` begins here.
        return sums[starts[first] : starts[first + count]]

    for distance in reversed(powers_of_two(comm.size)):
        partner = comm.rank ^ distance
        kept, given = block(comm.rank, distance), block(partner, distance)
        arriving = empty_like(kept)
        comm.exchange(given, partner, arriving, partner)
        add(kept, arriving)
    return copy(block(comm.rank, 1))


def hierarchical_all_reduce(
    buffer: Any, inside: Communicator, across: Communicator, op: str = "sum"
) -> None:
    """All-reduce so that a rank sends 2 (N - 1)/N n/L bytes across nodes; a ring sends nearly 2 n.

    `inside` are the L ranks of this node, and `across` the ranks at this one's place on all N nodes.
    """
    shard = reduce_scatter(buffer, inside, op)
    all_reduce(shard, across, op)
    all_gather(shard, inside, out=buffer)


def split(buffer: Any, parts: int) -> list[Any]:
    """View a buffer as `parts` flat chunks; the first n % parts have one element more."""
    array = flat(buffer)
    length, extra = divmod(len(array), parts)
    return cut(array, [length + (part < extra) for part in range(parts)])


def cut(array: Any, lengths: Sequence[int]) -> list[Any]:
    """View a flat buffer as chunks of these lengths."""
    ends = accumulate(lengths)
    return [array[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def reduction(op: str) -> Reduce:
    """Return what combines two buffers in place, into the first."""
    if op in ("sum", "mean"):
        return operator.iadd
    if op not in ("max", "min"):
        raise ValueError(f"op={op!r} is not known: use sum, mean, max or min")

    def keep(into: Any, other: Any) -> None:
        better = other > into if op == "max" else other < into
        into[better] = other[better]

    return keep


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4 ... below `limit`."""
    return [1 << bit for bit in range((limit - 1).bit_length())]

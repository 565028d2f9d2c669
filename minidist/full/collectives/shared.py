"""Shared memory: the ranks of one node read each other's buffers in place, as GPUs do over NVLink.

    registered buffers     fence   rank r: add chunk r of all, write the sum into every rank's chunk r   fence
    ordinary buffers       copy into registered memory what others need, and copy the results out of it

Messages carry no data. The bytes that a rank reads from or writes to another rank's memory count as
sent. All-reduce: 2 (P - 1)/P n bytes a rank, as in a ring, but in two fences instead of 2(P - 1)
messages, and without the copies that messages make. Up to `SMALL` bytes every rank adds up
everything itself: (P - 1) n bytes and a single fence. Two ranks do so up to `SMALL_FOR_TWO`, because
it costs them no more bytes. (NCCL's user buffer registration and PyTorch's symmetric memory are the
same idea.)
"""

from typing import Any

import numpy as np

from minidist.full.collectives.fast import blocks, cut, segments
from minidist.full.collectives.reduction import Combine
from minidist.full.comm.agree import agree
from minidist.full.comm.buffers import Array, Chunks, as_bytes, device_name, view_as
from minidist.full.comm.communicator import Communicator

SMALL = 1 << 14
SMALL_FOR_TWO = 1 << 17
# bytes that are published at a time: they stay in a core's cache until another core reads them
BLOCK = 1 << 19
HALF = 2 * BLOCK  # room for a block and one more piece
# offset from the start of a page: copying between equal offsets in two pages is half as fast
ASIDE = 1 << 11


def possible(comm: Communicator) -> bool:
    """Tell whether all ranks share memory. Torch.distributed offers no windows into other
    processes' memory.
    """
    return len(comm.node) == comm.size and comm.wire.kind != "torch"


def all_reduce(array: Array, comm: Communicator, combine: Combine) -> None:
    """Leave the reduction of all ranks' arrays in every rank's `array`."""
    peers = comm.registered.peers(_memory(array))
    if comm.ledger.debug:
        agree(comm, "all_reduce in shared memory", "ordinary" if peers is None else "registered")
    if peers is not None:
        comm.fence(array.nbytes)
        _reduce_own_chunk([view_as(peer, array.dtype) for peer in peers], comm, combine)
        comm.fence(array.nbytes)
    elif array.nbytes <= (SMALL_FOR_TWO if comm.size == 2 else SMALL):
        copies = _half(array, len(array), comm)
        comm.copy(copies[comm.rank], array)
        comm.fence(array.nbytes)
        _add_up(copies, array, comm, combine)
    elif comm.size == 2:
        _between_two(array, comm, combine)
    else:
        chunks = Chunks(array, cut(len(array), comm.size))
        for pieces in segments(chunks, BLOCK // (comm.size - 1)):
            everyones = _publish_pieces(pieces, comm, array.nbytes)
            # `answer` is unused until now
            mine, answer = pieces[comm.rank], everyones[comm.rank][comm.rank]
            _add_others(mine, everyones, mine, comm, combine)
            comm.copy(answer, mine)
            comm.fence(array.nbytes)
            for owner, piece in enumerate(pieces):
                _read(everyones[owner][owner], piece, owner, comm)


def reduce_scatter(
    chunks: Chunks,
    out: Array,
    comm: Communicator,
    combine: Combine,
) -> None:
    """Leave in `out` the reduction of all ranks' chunk number `comm.rank`. In registered memory,
    chunks are read where they are.
    """
    _memory(out)
    peers = comm.registered.peers(_memory(chunks.whole))
    if comm.ledger.debug:
        kind = "ordinary" if peers is None else "registered"
        agree(comm, "reduce_scatter in shared memory", kind)
    if peers is not None:
        wholes = [view_as(peer, out.dtype) for peer in peers]
        own = [Chunks(whole, chunks.lengths)[comm.rank] for whole in wholes]
        comm.fence(chunks.whole.nbytes)
        for *pieces, target in segments([*own, out], BLOCK):
            _add_pieces(pieces, target, comm, combine)
        comm.fence(chunks.whole.nbytes)
        return
    for pieces in segments(chunks, BLOCK // (comm.size - 1)):
        mine = pieces[comm.rank]
        everyones = _publish_pieces(pieces, comm, chunks.whole.nbytes)
        target, out = out[: len(mine)], out[len(mine) :]
        _add_others(mine, everyones, target, comm, combine)


def all_gather(chunks: Chunks, comm: Communicator) -> None:
    """Fill every other chunk from the rank that owns it; chunk number `comm.rank` is already
    filled.

    If the whole array is registered, or every rank's shard is at the same offset of registered
    memory, shards are read where they are.
    """
    lengths, source, out = chunks.lengths, chunks.brought, chunks.whole
    shards = _counterparts(out, [len(out)] * comm.size, comm)
    if shards is not None:
        shards = [Chunks(whole, lengths)[owner] for owner, whole in enumerate(shards)]
    elif source is not None and min(lengths):  # torch gives no address of an empty tensor
        shards = _counterparts(source, lengths, comm)
    agree(
        comm,
        "all_gather in shared memory",
        "ordinary" if shards is None else "registered",
    )
    if shards is not None:
        comm.fence(out.nbytes)
        for owner, chunk in enumerate(chunks):
            _read(shards[owner], chunk, owner, comm)
        comm.fence(out.nbytes)
        return
    for pieces in segments(chunks, BLOCK):
        copies = _publish(
            pieces[comm.rank],
            comm,
            out.nbytes,
            longest=max(len(piece) for piece in pieces),
        )
        for owner, piece in enumerate(pieces):
            _read(copies[owner][: len(piece)], piece, owner, comm)


def broadcast(array: Array, comm: Communicator, root: int) -> None:
    """Copy the root's `array` into every rank's."""
    _memory(array)
    for block in blocks(array, BLOCK):
        halves = _half(block, len(block), comm)
        if comm.rank == root:
            comm.copy(halves[root], block)
        comm.fence(array.nbytes)
        _read(halves[root], block, root, comm)


def _between_two(array: Array, comm: Communicator, combine: Combine) -> None:
    """Reduce one half on each rank, where the other rank has published it: there the answer is at
    home.

        rank 0   publish h1 ── fence ── h0 of rank 1 += own h0 ── fence ── copy h1 back
        rank 1   publish h0 ── fence ── h1 of rank 0 += own h1 ── fence ── copy h0 back

    As many bytes cross as if each rank added up everything, but through half as much shared memory,
    which stays in the cache: that saves a fifth of the time. The second fence of a segment is the
    first one of the next.
    """
    mine, other = comm.rank, 1 - comm.rank
    back: tuple[Array, Array] | None = None
    for pieces in segments(Chunks(array, cut(len(array), 2)), BLOCK // 2):
        everyones = _publish_pieces(pieces, comm, array.nbytes)
        if back is not None:
            comm.copy(*back)
        answer = everyones[other][mine]
        _add_others(pieces[mine], everyones, answer, comm, combine)
        comm.copy(pieces[mine], answer)
        comm.reach(answer.nbytes, other)
        back = pieces[other], everyones[mine][other]
    comm.fence(array.nbytes)
    if back is not None:
        comm.copy(*back)


def _reduce_own_chunk(copies: list[Array], comm: Communicator, combine: Combine) -> None:
    """Reduce chunk `comm.rank` of all copies, and write the sum into each.

    No other rank reads or writes this chunk meanwhile. Each segment of the sum is written while it
    is in the cache.
    """
    rank, counts = comm.rank, cut(len(copies[0]), comm.size)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    chunks = [whole[own] for whole in copies]
    others = [peer for peer in range(comm.size) if peer != rank]
    for pieces in segments(chunks, BLOCK):
        for peer in others:
            combine(pieces[rank], pieces[peer], pieces[rank])
        for peer in others:
            comm.copy(pieces[peer], pieces[rank])
    for peer in others:
        comm.reach(2 * chunks[rank].nbytes, peer)


def _add_others(
    mine: Array, everyones: list[Chunks], out: Array, comm: Communicator, combine: Combine
) -> None:
    """Leave in `out` the reduction of this rank's own piece and those that the others have
    published for it.
    """
    pieces = [chunks[comm.rank] for chunks in everyones]
    pieces[comm.rank] = mine
    _add_pieces(pieces, out, comm, combine)


def _add_pieces(pieces: list[Array], out: Array, comm: Communicator, combine: Combine) -> None:
    """Leave in `out` the reduction of this rank's own piece and those of the others."""
    mine = pieces[comm.rank]
    for rank, piece in enumerate(pieces):
        if rank != comm.rank:
            combine(mine, piece, out)
            comm.reach(out.nbytes, rank)
            mine = out


def _add_up(
    copies: list[Array],
    out: Array,
    comm: Communicator,
    combine: Combine,
) -> None:
    """Reduce all copies, in the order of ranks: the same bits on every rank."""
    mine, bytes = comm.rank, out.nbytes
    # `out` still holds this rank's own copy: adding in place is cheaper
    first = out if mine == 0 else copies[0]
    second = out if mine == 1 else copies[1]
    combine(first, second, out)
    for memory in copies[2:]:
        combine(out, memory, out)
    for peer in range(len(copies)):
        if peer != mine:
            comm.reach(bytes, peer)


def _read(memory: Array, target: Array, owner: int, comm: Communicator) -> None:
    """Copy what `owner` has published, unless this rank is the owner."""
    if owner != comm.rank:
        comm.copy(target, memory)
        comm.reach(target.nbytes, owner)


def _publish(array: Array, comm: Communicator, bytes: int, longest: int = 0) -> list[Array]:
    """Copy `array`, a part of so many bytes in all, into registered memory, wait for all ranks, and
    return every rank's copy.

    If arrays differ in length, every copy has the length of the `longest`.
    """
    copies = _half(array, longest or len(array), comm)
    comm.copy(copies[comm.rank][: len(array)], array)
    comm.fence(bytes)
    return copies


def _publish_pieces(pieces: list[Array], comm: Communicator, bytes: int) -> list[Chunks]:
    """Publish one piece for each other rank, of an array of so many bytes; return every rank's
    pieces.
    """
    counts = [len(piece) for piece in pieces]
    everyones = [Chunks(half, counts) for half in _half(pieces[0], sum(counts), comm)]
    for rank, piece in enumerate(pieces):
        if rank != comm.rank:
            comm.copy(everyones[comm.rank][rank], piece)
    comm.fence(bytes)
    return everyones


def _memory(array: Array) -> Any:
    """Return the memory of a CPU array as a numpy array; a numpy array as it is, which is
    fastest.
    """
    if isinstance(array, np.ndarray):
        return array
    if device_name(array) != "cpu":
        raise ValueError(
            f"algorithm='shared' reads CPU memory, but the buffer is on {device_name(array)}: use "
            "'ring'"
        )
    return as_bytes(array)


def _counterparts(array: Array, lengths: list[int], comm: Communicator) -> list[Array] | None:
    """Return every rank's counterpart of `array`, of `lengths` elements, or None if `array` is not
    registered.
    """
    memory = _memory(array)
    peers = comm.peers(memory, [length * array.itemsize // memory.itemsize for length in lengths])
    return None if peers is None else [view_as(peer.view(np.uint8), array.dtype) for peer in peers]


def _half(like: Array, count: int, comm: Communicator) -> list[Array]:
    """Return `count` elements, of the kind of `like`, of every rank's registered memory: the half
    not used last.

    Two halves save a fence. All ranks have passed the fence of one half only after they have
    finished reading the other, which may then be overwritten.
    """
    staging: Staging = comm.kept.get(Staging) or comm.keep(Staging, lambda: Staging(comm))
    return staging.turn(like, count)


class Staging:
    """Two halves of registered memory, used in turn.

    Views for small arrays are kept: making them takes as long as adding the arrays.
    """

    def __init__(self, comm: Communicator) -> None:
        self.mine = comm.allocate(ASIDE + 2 * HALF, np.uint8)
        memories = comm.peers(self.mine)
        if memories is None:  # as in a recording, where what travels is a message
            raise ValueError(
                "algorithm='shared' needs ranks that see each other's memory, and these do not: use "
                "'ring'"
            )
        self.memories = memories
        self.turns = 0  # so often a half was taken
        self.views: dict[tuple[int, int, object], list[Array]] = {}

    def turn(self, like: Array, count: int) -> list[Array]:
        """Return every rank's memory in the other half, as `count` elements of the kind of
        `like`.
        """
        self.turns += 1
        half = self.turns % 2
        key = (half, count, like.dtype)
        if (views := self.views.get(key)) is None:
            start, bytes = ASIDE + half * HALF, count * like.itemsize
            place = slice(start, start + bytes)
            views = [view_as(memory[place], like.dtype) for memory in self.memories]
            if bytes <= SMALL:
                self.views[key] = views
        return views

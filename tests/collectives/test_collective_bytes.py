"""What collectives send, counted, equals the textbook's formula: bytes and messages, per rank and
in total.

The formulas are written here once more, from the papers, not from the code. n is the buffer in
bytes, c(r) the part of it that belongs to rank r, P the ranks, Q the largest power of two in P.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from collective_cases import rounds

from minidist import Cluster, Communicator, run
from minidist.full.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from minidist.full.comm import Link

# elements: 5040 divides by all of 1 to 10; both of float64 are more than 16 KiB or less
DIVISIBLE, ODD = 840 * 6, 1003
Call = Callable[[Communicator], object]


def traffic(call: Call, ranks: int, cluster: Cluster | None = None) -> tuple[list[int], list[int]]:
    """Return bytes and messages that each rank sent in the second of two calls: the first may set
    things up.
    """

    def program(comm: Communicator) -> tuple[int, int]:
        call(comm)
        bytes, messages = comm.traffic.bytes, comm.traffic.messages
        call(comm)
        return comm.traffic.bytes - bytes, comm.traffic.messages - messages

    counted = run(program, ranks, cluster=cluster)
    return [bytes for bytes, _ in counted], [messages for _, messages in counted]


def parts(elements: int, ranks: int) -> list[int]:
    """Return c(r)."""
    return [8 * len(part) for part in np.array_split(np.empty(elements), ranks)]


def power(ranks: int) -> int:
    return max(q for q in (1, 2, 4, 8, 16) if q <= ranks)


def children(ranks: int) -> list[int]:
    """Return how many ranks each one tells when news spread from 0 in a binomial tree."""
    told, informed = [0] * ranks, {0}
    for step in reversed(range(rounds(ranks))):
        for teller in sorted(informed):
            if teller + 2**step < ranks:
                told[teller] += 1
                informed.add(teller + 2**step)
    assert len(informed) == ranks
    return told


EVERY = pytest.mark.parametrize("ranks", (2, 3, 4, 5, 6, 7, 8))
BOTH = pytest.mark.parametrize("elements", (DIVISIBLE, ODD))


@EVERY
@BOTH
def test_all_reduce(ranks: int, elements: int) -> None:
    n, c, q = 8 * elements, parts(elements, ranks), power(ranks)
    # log2 Q, and how many ranks have to hand their data to a partner
    bits, beyond = rounds(q), ranks - q

    def counted(algorithm: str) -> tuple[list[int], list[int]]:
        return traffic(lambda comm: all_reduce(np.ones(elements), comm, algorithm=algorithm), ranks)

    bytes, messages = counted("ring")
    assert messages == [2 * (ranks - 1)] * ranks
    assert bytes == [(n - c[r]) + (n - c[(r + 1) % ranks]) for r in range(ranks)]
    assert sum(bytes) == 2 * (ranks - 1) * n

    bytes, messages = counted("recursive")
    assert bytes == [n if r >= q else bits * n + (n if r < beyond else 0) for r in range(ranks)]
    assert messages == [1 if r >= q else bits + (r < beyond) for r in range(ranks)]

    bytes, messages = counted("halving_doubling")
    assert messages == [1 if r >= q else 2 * bits + (r < beyond) for r in range(ranks)]
    assert sum(bytes) == 2 * (q - 1) * n + 2 * beyond * n
    if elements % q == 0:
        assert bytes == [
            n if r >= q else 2 * (q - 1) * n // q + (n if r < beyond else 0) for r in range(ranks)
        ]

    bytes, messages = counted("tree")
    assert bytes == [n * ((r > 0) + below) for r, below in enumerate(children(ranks))]
    assert sum(bytes) == 2 * (ranks - 1) * n and sum(messages) == 2 * (ranks - 1)

    bytes, messages = counted("central")
    assert bytes == [(ranks - 1) * n] + [n] * (ranks - 1) and messages == [ranks - 1] + [1] * (
        ranks - 1
    )

    bytes, messages = counted("shared")
    if n > 1 << 14:  # each adds up its part of all, and reads the others'
        assert bytes == [(ranks - 1) * c[r] + (n - c[r]) for r in range(ranks)]
        assert sum(bytes) == 2 * (ranks - 1) * n
    else:  # each adds up everything
        assert bytes == [(ranks - 1) * n] * ranks


@EVERY
@BOTH
def test_all_reduce_of_registered_buffers(ranks: int, elements: int) -> None:
    def program(comm: Communicator) -> tuple[int, int]:
        buffer = comm.allocate(elements, np.float64)
        all_reduce(buffer, comm, algorithm="shared")
        return comm.traffic.bytes, comm.traffic.messages

    bytes, messages = zip(*run(program, ranks), strict=True)
    # read it, write it
    assert list(bytes) == [2 * (ranks - 1) * part for part in parts(elements, ranks)]
    assert list(messages) == [2 * rounds(ranks)] * ranks  # two barriers


@BOTH
@pytest.mark.parametrize(
    ("nodes", "per_node"), [(2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (3, 3), (1, 4), (4, 1)]
)
def test_hierarchical_all_reduce(nodes: int, per_node: int, elements: int) -> None:
    ranks, n = nodes * per_node, 8 * elements
    cluster = Cluster(Link(1e-6, 1e9), Link(1e-5, 1e8), per_node)
    bytes, messages = traffic(
        lambda comm: all_reduce(np.ones(elements), comm, algorithm="hierarchical"), ranks, cluster
    )
    assert messages == [2 * (per_node - 1) + 2 * (nodes - 1)] * ranks
    assert sum(bytes) == 2 * (ranks - 1) * n
    if elements % ranks == 0:
        inside, across = 2 * (per_node - 1) * n // per_node, 2 * (nodes - 1) * n // ranks
        assert bytes == [inside + across] * ranks


@BOTH
@pytest.mark.parametrize("ranks", (3, 5, 7))
def test_hierarchical_all_reduce_on_unequal_nodes(ranks: int, elements: int) -> None:
    cluster = Cluster(Link(1e-6, 1e9), Link(1e-5, 1e8), 2)
    bytes, _ = traffic(
        lambda comm: all_reduce(np.ones(elements), comm, algorithm="hierarchical"), ranks, cluster
    )
    # (P - N) in and out of the leaders, a ring of N leaders
    assert sum(bytes) == 2 * (ranks - 1) * 8 * elements


@EVERY
@BOTH
def test_reduce_scatter(ranks: int, elements: int) -> None:
    n, c = 8 * elements, parts(elements, ranks)
    for algorithm in ("ring", "pairwise"):
        bytes, messages = traffic(
            lambda comm, a=algorithm: reduce_scatter(np.ones(elements), comm, algorithm=a), ranks
        )
        assert bytes == [n - part for part in c], algorithm
        assert messages == [ranks - 1] * ranks, algorithm
    bytes, _ = traffic(
        lambda comm: reduce_scatter(np.ones(elements), comm, algorithm="shared"), ranks
    )
    assert bytes == [(ranks - 1) * part for part in c]
    if power(ranks) == ranks:
        bytes, messages = traffic(
            lambda comm: reduce_scatter(np.ones(elements), comm, algorithm="recursive"), ranks
        )
        assert messages == [rounds(ranks)] * ranks and sum(bytes) == (ranks - 1) * n
        assert elements % ranks or bytes == [(ranks - 1) * n // ranks] * ranks


@EVERY
@BOTH
def test_all_gather(ranks: int, elements: int) -> None:
    n, c = 8 * elements, parts(elements, ranks)

    def counted(algorithm: str) -> tuple[list[int], list[int]]:
        return traffic(
            lambda comm: all_gather(np.ones(c[comm.rank] // 8), comm, algorithm=algorithm), ranks
        )

    bytes, messages = counted("ring")
    assert (
        bytes == [n - c[(r + 1) % ranks] for r in range(ranks)] and messages == [ranks - 1] * ranks
    )
    bytes, messages = counted("pairwise")
    assert bytes == [(ranks - 1) * part for part in c] and messages == [ranks - 1] * ranks
    bytes, messages = counted("shared")
    assert bytes == [n - part for part in c]
    if power(ranks) == ranks:
        bytes, messages = counted("recursive")
        assert sum(bytes) == (ranks - 1) * n and messages == [ranks - 1] * ranks
        assert elements % ranks or bytes == [(ranks - 1) * n // ranks] * ranks


@EVERY
@pytest.mark.parametrize("root", (0, 1))
def test_broadcast_and_reduce(ranks: int, root: int) -> None:
    n, buffer = 8 * ODD, np.ones(ODD)
    relative = [(rank - root) % ranks for rank in range(ranks)]
    tree = children(ranks)

    bytes, _ = traffic(lambda comm: broadcast(buffer.copy(), comm, root, "central"), ranks)
    assert bytes == [(ranks - 1) * n if rank == root else 0 for rank in range(ranks)]
    bytes, messages = traffic(lambda comm: broadcast(buffer.copy(), comm, root, "tree"), ranks)
    assert bytes == [tree[number] * n for number in relative] and messages == [
        tree[number] for number in relative
    ]
    bytes, _ = traffic(lambda comm: broadcast(buffer.copy(), comm, root, "shared"), ranks)
    assert bytes == [0 if rank == root else n for rank in range(ranks)]
    for algorithm in ("central", "tree"):
        bytes, messages = traffic(
            lambda comm, a=algorithm: reduce(buffer.copy(), comm, root, "sum", a), ranks
        )
        assert bytes == [0 if rank == root else n for rank in range(ranks)]
        assert messages == [int(rank != root) for rank in range(ranks)]


@EVERY
@pytest.mark.parametrize("root", (0, 2))
def test_gather_and_scatter(ranks: int, root: int) -> None:
    root %= ranks
    n, c = 8 * ODD, parts(ODD, ranks)
    # in the tree: each bit is one hop
    depth = [((rank - root) % ranks).bit_count() for rank in range(ranks)]

    def gathering(algorithm: str) -> Call:
        return lambda comm: gather(np.ones(c[comm.rank] // 8), comm, root, algorithm)

    def scattering(algorithm: str) -> Call:
        return lambda comm: scatter(
            np.ones(ODD) if comm.rank == root else None, comm, root, algorithm
        )

    bytes, _ = traffic(gathering("central"), ranks)
    assert bytes == [0 if rank == root else c[rank] for rank in range(ranks)]
    bytes, _ = traffic(scattering("central"), ranks)
    assert bytes == [n - c[root] if rank == root else 0 for rank in range(ranks)]
    for call in (gathering("tree"), scattering("tree")):
        bytes, messages = traffic(call, ranks)
        assert sum(bytes) == sum(part * hops for part, hops in zip(c, depth, strict=True))
        assert sum(messages) == ranks - 1


@EVERY
@BOTH
def test_all_to_all(ranks: int, elements: int) -> None:
    bytes, messages = traffic(lambda comm: all_to_all(np.ones(elements), comm), ranks)
    assert bytes == [8 * elements - part for part in parts(elements, ranks)]
    assert messages == [ranks - 1] * ranks


@EVERY
def test_a_barrier_sends_empty_messages(ranks: int) -> None:
    assert traffic(lambda comm: comm.barrier(), ranks) == ([0] * ranks, [rounds(ranks)] * ranks)


@pytest.mark.parametrize("algorithm", ("ring", "tree"))
def test_segments_do_not_change_the_bytes(algorithm: str) -> None:
    elements, ranks = 3 * (1 << 20) // 8 * 3, 3
    bytes, messages = traffic(
        lambda comm: all_reduce(np.ones(elements), comm, algorithm=algorithm), ranks
    )
    assert sum(bytes) == 2 * (ranks - 1) * 8 * elements
    assert min(messages) > 2 * (ranks - 1)


# ---------------------------------------------------------------- which of them `auto` takes


@pytest.mark.parametrize("ranks", (4, 5, 8))
@pytest.mark.parametrize("few", (True, False))
def test_auto_sends_few_messages_where_bytes_are_few(ranks: int, few: bool) -> None:
    """And where they are many, the fewest bytes; halves and doubles need a power of two of ranks."""
    elements = 40 if few else 5000
    whole, beyond = power(ranks) == ranks, ranks - power(ranks)

    _, messages = traffic(lambda comm: all_reduce(np.ones(elements), comm), ranks)
    doubling = [
        1 if r >= power(ranks) else rounds(power(ranks)) + (r < beyond) for r in range(ranks)
    ]
    assert messages == (doubling if few else [2 * (ranks - 1)] * ranks)

    halving = [rounds(ranks) if few and whole else ranks - 1] * ranks
    _, messages = traffic(lambda comm: reduce_scatter(np.ones(elements), comm), ranks)
    assert messages == halving

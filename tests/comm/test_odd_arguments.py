"""Arguments that are no ranks, tags, colors, roots, counts or times: refused in one sentence, not cut
down to whole numbers."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minidist
from minidist import Cluster, Communicator, Layout, Mesh, Trace
from minidist.draw.recording import record
from minidist.full.collectives import (
    algorithms,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    explain,
    prepare,
    reduce_scatter,
)
from minidist.full.comm import DeadlockError, Link, MismatchError

ONE = np.zeros(1)
SIX = np.zeros(6)
LINK = Link(1e-6, 1e9)

ON_RANKS: dict[str, Callable[[Communicator], object]] = {
    "tag=0.5 must be a whole number": lambda c: c.isend(ONE, 1 - c.rank, tag=0.5),  # type: ignore[arg-type]
    "tag='5' must be a whole number": lambda c: c.irecv(ONE, 1 - c.rank, tag="5"),  # type: ignore[arg-type]
    "to=0.0 must be a whole number": lambda c: c.isend(ONE, 0.0),  # type: ignore[arg-type]
    "source=None must be a whole number": lambda c: c.recv(ONE, None),  # type: ignore[arg-type]
    "color=0.7 must be a whole number": lambda c: c.split(0.7),  # type: ignore[arg-type]
    "key=0.5 must be a whole number": lambda c: c.split(0, key=0.5),  # type: ignore[arg-type]
    "size=1.5 must be a whole number": lambda c: c.levels(1.5),  # type: ignore[arg-type]
    "size=0 must be at least 1": lambda c: c.levels(0),
    "root=0.5 must be a whole number": lambda c: broadcast(ONE, c, root=0.5),  # type: ignore[arg-type]
    "counts=[2.5, 3.5] must be 2 numbers of rows": lambda c: reduce_scatter(
        SIX,
        c,
        counts=[2.5, 3.5],  # type: ignore[list-item]
    ),
    "counts=[1.0, 1.0] must be 2 numbers of rows": lambda c: all_gather(ONE, c, counts=[1.0, 1.0]),  # type: ignore[list-item]
    "receive_counts=[9, 9] says what arrives, but nothing what leaves": lambda c: all_to_all(
        SIX, c, receive_counts=[9, 9]
    ),
    "the ranks [0, 1, 1] of 'g' must be different ones, from 0 to 1": lambda c: c.subgroup(
        [0, 1, 1], "g"
    ),
    "the ranks [0, 1, 2] of 'g' must be different ones, from 0 to 1": lambda c: c.subgroup(
        [0, 1, 2], "g"
    ),
    "advance(nan)": lambda c: c.advance(math.nan),
    "advance(inf)": lambda c: c.advance(math.inf),
    "there is no collective 'allreduce'": lambda c: explain("allreduce", 8, c),
}


@pytest.mark.parametrize("said", ON_RANKS)
def test_a_rank_is_told(said: str) -> None:
    def program(comm: Communicator) -> str:
        with pytest.raises((TypeError, ValueError)) as refusal:
            ON_RANKS[said](comm)
        return str(refusal.value)

    for words in minidist.run(program, 2):
        assert words.startswith(said)


def nothing(comm: Communicator) -> None:
    """What ranks do that are never started."""


BEFORE: dict[str, Callable[[], object]] = {
    "ranks=2.5 must be a whole number": lambda: minidist.run(nothing, 2.5),  # type: ignore[arg-type]
    "eager_limit=-1 must be at least 0": lambda: minidist.run(nothing, 2, eager_limit=-1),
    "cluster='h100' is no cluster": lambda: minidist.run(nothing, 2, cluster="h100"),
    "trace='a.json' is no trace": lambda: minidist.run(nothing, 2, trace="a.json"),
    "nodes=0 must be at least 1": lambda: Cluster.h100(nodes=0),
    "nodes=1.5 must be a whole number": lambda: Cluster.h100(nodes=1.5),  # type: ignore[arg-type]
    "ranks_per_node=0 must be at least 1": lambda: Cluster(LINK, LINK, ranks_per_node=0),
    "flops=nan must be > 0": lambda: Cluster(LINK, LINK, flops=math.nan),
    "latency=nan must be >= 0 seconds": lambda: Link(math.nan, 1e9),
    "latency=0 must be >= 0 seconds and bandwidth=nan > 0": lambda: Link(0, math.nan),
    "there is no collective 'allreduce'": lambda: algorithms("allreduce"),
    "5 ranks do not fit a cluster cluster of 4 devices: run with ranks=4, or nodes=3": lambda: (
        minidist.run(nothing, 5, cluster=Cluster(LINK, LINK, ranks_per_node=2, nodes=2))
    ),
}


@pytest.mark.parametrize("said", BEFORE)
def test_no_rank_is_started(said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        BEFORE[said]()


def test_numpys_whole_numbers_are_whole_numbers() -> None:
    def program(comm: Communicator) -> Any:
        one, zero = np.int64(1), np.uint8(0)
        group = comm.split(zero, key=np.int8(-comm.rank))
        if comm.rank == 0:
            comm.send(ONE, one, tag=np.int32(7))
        else:
            comm.recv(ONE, zero, tag=np.int16(7))
        return group.members, comm.subgroup(np.arange(2), "g").members

    found = minidist.run(program, np.int64(2), trace=Trace())
    assert found == [((1, 0), (0, 1))] * 2


def test_ranks_that_bring_different_layouts_are_told_on_every_rank() -> None:
    """Their groups would be mixed up: rank 1 took rank 0's pipeline for its tensor group."""

    def program(comm: Communicator) -> str:
        layout = Layout(tp=2) if comm.rank else Layout(dp=2)
        with pytest.raises(MismatchError) as refusal:
            Mesh(comm, layout)
        return str(refusal.value)

    words = minidist.run(program, 2)
    assert words[0] == words[1]
    assert "rank 0 calls Mesh(Layout(dp=2, pp=1, cp=1, tp=1" in words[0]
    assert "rank 1 calls Mesh(Layout(dp=1, pp=1, cp=1, tp=2" in words[0]


def test_ranks_that_allocate_different_bytes_are_told_on_every_rank() -> None:
    """On MPI each would take another place of the window for the start of a neighbour's part."""

    def program(comm: Communicator) -> str:
        with pytest.raises(MismatchError) as refusal:
            comm.allocate(1000 * (1 + comm.rank), "float64")
        return str(refusal.value)

    words = minidist.run(program, 2)
    assert words[0] == words[1]
    assert "rank 0 calls allocate(8000 bytes) at test_odd_arguments.py" in words[0]
    assert "rank 1 calls allocate(16000 bytes) at test_odd_arguments.py" in words[0]


IN_SHARED_MEMORY: dict[str, Callable[[int, Communicator], object]] = {
    "all_reduce": lambda n, c: all_reduce(np.zeros(n), c, algorithm="shared"),
    "reduce_scatter": lambda n, c: reduce_scatter(np.zeros(n), c, algorithm="shared"),
    "all_gather": lambda n, c: all_gather(np.zeros(n), c, np.zeros(3 * n), algorithm="shared"),
    "broadcast": lambda n, c: broadcast(np.zeros(n), c, algorithm="shared"),
    "a handle": lambda n, c: prepare("all_reduce", np.zeros(n), c, algorithm="shared")(),
}


@pytest.mark.parametrize("what", IN_SHARED_MEMORY)
@pytest.mark.parametrize("sizes", [(4, 4, 5), (10**6, 2 * 10**6, 10**6)])
def test_different_sizes_in_shared_memory_are_a_mismatch(
    what: str, sizes: tuple[int, int, int]
) -> None:
    """No message tells them, and what one rank reads where another has written less is garbage."""
    with pytest.raises(
        MismatchError, match=r"rank \d brings \d+ bytes .* rank \d brings \d+: give"
    ):
        minidist.run(lambda c: IN_SHARED_MEMORY[what](sizes[c.rank], c), 3)


def test_a_recording_refuses_memory_that_its_ranks_do_not_share() -> None:
    """There what travels is a message: `shared` broke off with an IndexError."""
    with pytest.raises(ValueError, match="needs ranks that see each other's memory"):
        record(lambda comm: all_reduce(np.zeros(4), comm, algorithm="shared"), 3)


def test_a_deadlock_is_no_single_ranks() -> None:
    """It bore the note "[rank 0] raised this", which is no line of the report."""
    with pytest.raises(DeadlockError) as report:
        minidist.run(lambda comm: comm.recv(np.zeros(1), 1 - comm.rank), 2)
    assert not hasattr(report.value, "__notes__")

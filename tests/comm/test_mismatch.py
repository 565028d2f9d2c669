"""Collectives that the ranks do not call alike: in debug mode every rank says in words what
differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from minidist import Cluster, Communicator, DeadlockError, run
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
from minidist.full.comm import CommunicationError, Link, MismatchError

FOUR = np.ones(4)

# what rank 0 calls, what rank 1 calls, and what must be said about either
MISMATCHES: dict[
    str, tuple[Callable[[Communicator], object], Callable[[Communicator], object], str, str]
] = {
    "operation": (
        lambda c: all_reduce(FOUR.copy(), c),
        lambda c: broadcast(FOUR.copy(), c),
        r"all_reduce\(float64, 4, sum",
        r"broadcast\(float64, 4",
    ),
    "size": (
        lambda c: all_reduce(np.ones(4), c),
        lambda c: all_reduce(np.ones(5), c),
        r"all_reduce\(float64, 4",
        r"all_reduce\(float64, 5",
    ),
    "dtype": (
        lambda c: all_reduce(np.ones(4, np.float32), c),
        lambda c: all_reduce(np.ones(4, np.int32), c),
        "float32",
        "int32",
    ),
    "op": (
        lambda c: all_reduce(np.ones(4), c, "sum"),
        lambda c: all_reduce(np.ones(4), c, "max"),
        "sum",
        "max",
    ),
    "algorithm": (
        lambda c: all_reduce(np.ones(4), c, algorithm="ring"),
        lambda c: all_reduce(np.ones(4), c, algorithm="tree"),
        "ring",
        "tree",
    ),
    "root": (
        lambda c: broadcast(FOUR.copy(), c, root=0),
        lambda c: broadcast(FOUR.copy(), c, root=1),
        "root=0",
        "root=1",
    ),
    "root of a reduce": (
        lambda c: reduce(np.ones(4), c, 0),
        lambda c: reduce(np.ones(4), c, 1),
        "root=0",
        "root=1",
    ),
    "root of a scatter": (
        lambda c: scatter(FOUR, c, 0),
        lambda c: scatter(FOUR, c, 1),
        "root=0",
        "root=1",
    ),
    "root of a gather": (
        lambda c: gather(FOUR, c, 0),
        lambda c: gather(FOUR, c, 1),
        "root=0",
        "root=1",
    ),
    "roll calls of different collectives": (
        lambda c: all_gather(FOUR, c),
        lambda c: all_reduce(np.ones(4), c),
        "all_gather",
        "all_reduce",
    ),
    "gather and scatter": (
        lambda c: gather(FOUR, c),
        lambda c: scatter(FOUR, c, 1),
        "gather",
        "scatter",
    ),
    "row shape": (
        lambda c: reduce_scatter(np.ones((4, 2)), c),
        lambda c: reduce_scatter(np.ones((2, 4)), c),
        r"\[4, 2\]",
        r"\[2, 4\]",
    ),
    "counts": (
        lambda c: all_gather(FOUR, c, counts=[4, 3]),
        lambda c: all_gather(np.ones(3), c, counts=(4, 4)),
        r"counts=\[4, 3\]",
        r"counts=\[4, 4\]",
    ),
    "counts on one rank only": (
        lambda c: all_gather(FOUR, c, counts=[4, 4]),
        lambda c: all_gather(FOUR, c),
        r"counts=\[4, 4\]",
        "counts=None",
    ),
    "out on one rank only": (
        lambda c: all_gather(FOUR, c, np.empty(8)),
        lambda c: all_gather(FOUR, c),
        r"out=\[8\]",
        "out=None",
    ),
    "rows of an all_to_all": (
        lambda c: all_to_all(np.ones(4), c),
        lambda c: all_to_all(np.ones(6), c),
        "sent=4",
        "sent=6",
    ),
    "split": (lambda c: c.split(0), lambda c: all_reduce(np.ones(4), c), "split", "all_reduce"),
    "fork": (lambda c: c.fork(), lambda c: c.split(0), "fork", "split"),
    "allocate": (
        lambda c: c.allocate(3, "f4"),
        lambda c: c.allocate(4, "f4"),
        "12 bytes",
        "16 bytes",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_debug_mode_names_what_differs_on_every_rank(case: str) -> None:
    first, second, word_of_0, word_of_1 = MISMATCHES[case]

    def program(comm: Communicator) -> str:
        with pytest.raises(MismatchError) as caught:
            (first if comm.rank == 0 else second)(comm)
        return str(caught.value)

    said = run(program, 2, debug=True)
    assert said[0] == said[1], "every rank must say the same"
    assert re.search(f"rank 0 calls .*{word_of_0}.*rank 1 calls .*{word_of_1}", said[0]), said[0]


@pytest.mark.parametrize("case", MISMATCHES)
def test_without_debug_mode_a_mismatch_never_hangs(case: str) -> None:
    first, second, _, _ = MISMATCHES[case]
    # Where no message shows it, it may also pass unnoticed: that is what debug mode is for.
    with suppress(CommunicationError, ValueError, TypeError, AttributeError):
        run(lambda comm: (first if comm.rank == 0 else second)(comm), 2)


def test_debug_mode_names_a_different_order() -> None:
    def program(comm: Communicator) -> None:
        calls = [lambda: all_reduce(np.ones(4), comm), lambda: broadcast(np.ones(4), comm)]
        for call in calls if comm.rank != 2 else reversed(calls):
            call()

    with pytest.raises(MismatchError, match=r"rank 1 calls all_reduce.*rank 2 calls broadcast"):
        run(program, 3, debug=True)


def test_a_collective_on_some_ranks_only_is_a_deadlock_that_names_it() -> None:
    for debug in (False, True):
        with pytest.raises(
            DeadlockError, match=r"in all_reduce at test_mismatch\.py:\d+"
        ) as caught:
            run(lambda comm: comm.rank == 1 or all_reduce(np.ones(4), comm), 2, debug=debug)
        assert "rank 0 waits for rank 1, which has finished" in str(caught.value)


@pytest.mark.parametrize("on_stream", (False, True))
def test_without_debug_mode_too_different_sizes_are_told_with_each_ranks_call_and_line(
    on_stream: bool,
) -> None:
    """As where rank 0 alone asks for a state dict, and its all-gather meets another collective."""

    def program(comm: Communicator) -> None:
        one = comm.stream() if on_stream else None
        group = one.comm if one else comm
        call = partial(all_reduce, np.ones(9), group, algorithm="ring")
        if comm.rank == 0:
            call = partial(all_gather, np.ones(9), group, np.ones(18), algorithm="ring")
        if one:
            one.launch(call).wait()
        else:
            call()

    with pytest.raises(MismatchError) as caught:
        run(program, 2)
    said = str(caught.value)
    assert re.search(r"sends \d+ bytes .*buffer of \d+ \(inside a collective; ", said)
    for rank, call in ((0, "all_gather"), (1, "all_reduce")):
        assert re.search(rf"rank {rank}\S* in {call}", said), said
        assert re.search(rf"rank {rank}.* at test_mismatch\.py:\d+ in program", said), said


@pytest.mark.parametrize("per_node", (None, 1, 2, 3))
def test_debug_mode_changes_no_result_and_counts_nothing(per_node: int | None) -> None:
    cluster = Cluster(Link(1e-6, 1e9), Link(1e-5, 1e8), per_node)

    def program(comm: Communicator) -> tuple[int, int, float, bytes]:
        buffer = np.arange(1000.0) * comm.rank
        all_reduce(buffer, comm)
        whole = all_gather(reduce_scatter(buffer, comm), comm, np.empty(1000), counts=None)
        full = scatter(gather(whole[: comm.rank], comm, 1), comm, 1)
        all_to_all(full, comm, "auto", [len(full)] + [0] * (comm.size - 1))
        return comm.traffic.bytes, comm.traffic.messages, comm.clock(), whole.tobytes()

    assert run(program, 5, cluster=cluster, debug=True) == run(program, 5, cluster=cluster)


@pytest.mark.parametrize(
    ("value", "debug", "expected"), [("1", None, True), ("0", None, False), ("1", False, False)]
)
def test_simulated_ranks_heed_the_environment(
    value: str, debug: bool | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIDIST_DEBUG", value)
    assert run(lambda comm: comm.debug, 2, debug=debug) == [expected] * 2

"""Simulated ranks, at length: thousands of random programs and collectives, messages beyond 2
GiB.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from collective_cases import FEW, ROUNDING, available, cells, check, copied, digest, draw, sizes
from test_clock import noisy
from test_deadlock import legal_program

from minidist import Cluster, Communicator, run
from minidist.full.collectives import COLLECTIVES, DTYPES, REDUCTIONS, all_reduce, broadcast
from minidist.full.collectives.reduction import BITWISE
from minidist.full.comm import Link

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def random_cluster(plan: random.Random) -> Cluster | None:
    links = Link(plan.choice([0, 1e-6]), 1e9), Link(1e-5, 1e8)
    return None if plan.random() < 0.5 else Cluster(*links, plan.choice([None, 1, 2, 3, 4]))


def test_thousands_of_random_legal_programs_pass() -> None:
    for seed in range(3000):
        plan = random.Random(seed)
        ranks, style = plan.randint(2, 10), plan.choice(["wait", "poll"])
        run(
            partial(legal_program, seed=seed, messages=plan.randint(0, 100), style=style),
            ranks,
            cluster=random_cluster(plan),
            eager_limit=plan.choice([0, 0, 16, 1000]),
        )
    assert threading.active_count() < 10


def test_thousands_of_random_all_reduces_agree() -> None:
    for seed in range(2000):
        plan = random.Random(seed)
        ranks, count = (
            plan.randint(1, 12),
            plan.choice([0, 1, plan.randint(2, 50), plan.randint(50, 5000)]),
        )
        dtype, op = plan.choice(DTYPES), plan.choice(REDUCTIONS)
        numbers = dtype in ROUNDING
        op = "sum" if (op == "mean" and not numbers) or (op in BITWISE and numbers) else op
        inputs = [draw(count, dtype, rank, seed) for rank in range(ranks)]

        def program(comm: Communicator, inputs: list[object] = inputs, op: str = op) -> list[str]:
            digests = []
            for algorithm in available("all_reduce", comm):
                buffer = copied(inputs[comm.rank])
                all_reduce(buffer, comm, op, algorithm)
                digests.append(digest(buffer))
            return digests

        results = run(program, ranks, cluster=random_cluster(plan), debug=plan.random() < 0.3)
        assert all(digests == results[0] for digests in results), f"seed {seed}"


@pytest.mark.parametrize("ranks", (9, 12, 16))
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_more_ranks(operation: str, ranks: int) -> None:
    run(lambda comm: check(comm, cells([operation], FEW, ("sum", "mean")), sizes(ranks)), ranks)


def test_virtual_times_are_the_same_in_hundreds_of_runs() -> None:
    cluster = Cluster(Link(1e-6, 1e9), Link(5e-6, 1e8), ranks_per_node=2)
    first = run(lambda comm: noisy(comm, random.Random(comm.rank)), 6, cluster=cluster)
    for attempt in range(300):
        times = run(
            lambda comm, a=attempt: noisy(comm, random.Random(100 * a + comm.rank)),
            6,
            cluster=cluster,
        )
        assert times == first, f"run {attempt}"


def test_a_ring_of_any_number_of_ranks_takes_exactly_its_formula() -> None:
    import torch

    for ranks in (*range(2, 65), 100, 128):
        n = ranks << 20
        buffer = torch.empty(n, dtype=torch.uint8, device="meta")

        def program(comm: Communicator, buffer: torch.Tensor = buffer) -> float:
            all_reduce(buffer, comm, algorithm="ring")
            return comm.clock()

        times = run(program, ranks, cluster=Cluster.uniform(3e-6, 2e9))
        assert times == pytest.approx(
            [2 * (ranks - 1) * (3e-6 + n / (ranks * 2e9))] * ranks, rel=1e-12, abs=0
        )


def test_ranks_that_fail_at_random_moments_always_end_the_run() -> None:
    def program(comm: Communicator, victim: int, delay: float) -> None:
        stream, started = comm.stream(), time.perf_counter()
        while True:
            handle = stream.launch(all_reduce, np.ones(100), stream.comm)
            all_reduce(np.ones(1000), comm)
            handle.wait()
            if comm.rank == victim and time.perf_counter() - started > delay:
                raise ValueError("bad luck")

    for seed in range(300):
        plan = random.Random(seed)
        ranks = plan.randint(2, 8)
        with pytest.raises(ValueError, match="bad luck"):
            run(partial(program, victim=plan.randrange(ranks), delay=0.05 * plan.random()), ranks)
    time.sleep(1.5)
    assert threading.active_count() < 10, "threads stayed behind"


BEYOND = (1 << 31) + (1 << 20) + 3  # elements of one byte


def _send(comm: Communicator, buffer: np.ndarray) -> None:  # type: ignore[type-arg]
    comm.send(buffer, 1) if comm.rank == 0 else comm.recv(buffer, 0)


BIG: dict[str, Callable[[Communicator, np.ndarray], None]] = {  # type: ignore[type-arg]
    "send": _send,
    "broadcast": lambda comm, buffer: broadcast(buffer, comm),
    "ring": lambda comm, buffer: all_reduce(buffer, comm, "max", "ring"),
    "shared": lambda comm, buffer: all_reduce(buffer, comm, "max", "shared"),
}


@pytest.mark.parametrize("way", BIG)
def test_buffers_beyond_two_gibibytes(way: str) -> None:
    def program(comm: Communicator) -> None:
        buffer = np.zeros(BEYOND, np.uint8)
        if comm.rank == 0:
            buffer[::4097] = 7
            buffer[-1] = 9
        BIG[way](comm, buffer)
        assert (
            buffer[-1] == 9
            and (buffer[: BEYOND - 1 : 4097] == 7).all()
            and buffer[1:4097].max() == 0
        )

    run(program, 2)

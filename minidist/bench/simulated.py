"""64 simulated ranks, ring all-reduce of 1 GiB of meta tensors: how long it takes here, and what its clock says."""

from __future__ import annotations

import time
from collections.abc import Iterator

from minidist.bench.measure import Measurement

ROUNDS = 5
RANKS = 64
BYTES = 1 << 30
LATENCY, BANDWIDTH = 10e-6, 10e9


def bench_threads(rounds: int, ranks: int = RANKS, bytes: int = BYTES) -> Iterator[Measurement]:
    """Measure the wall time, and how far the virtual time is from 2(P-1)(latency + n/(P bandwidth))."""
    import torch

    from minidist import Cluster, run
    from minidist.collectives import all_reduce
    from minidist.comm import Communicator

    def program(comm: Communicator) -> float:
        all_reduce(torch.empty(bytes // 4, device="meta"), comm, algorithm="ring")
        return comm.clock()

    formula = 2 * (ranks - 1) * (LATENCY + bytes / ranks / BANDWIDTH)
    wall, errors = [], []
    for _ in range(rounds or ROUNDS):
        started = time.perf_counter()
        clocks = run(program, ranks, cluster=Cluster.uniform(LATENCY, BANDWIDTH))
        wall.append(time.perf_counter() - started)
        errors.append(max(abs(clock / formula - 1) for clock in clocks))
    case = f"{ranks} ranks, ring"
    yield Measurement("threads", case, "wall time", "here", tuple(wall), "s", bytes, ranks)
    yield Measurement("threads", case, "virtual time / formula - 1", "here", tuple(errors), "", bytes, ranks)

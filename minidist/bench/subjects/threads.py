"""64 simulated ranks, ring all-reduce of 1 GiB of meta tensors: how long it takes here, and what its clock says."""

import time
from collections.abc import Iterator

import torch

from minidist import Cluster, run
from minidist.bench.subject import Counted, Setting, subject
from minidist.collectives import all_reduce
from minidist.comm import Communicator

RANKS = 64
BYTES = 1 << 30
LATENCY, BANDWIDTH = 10e-6, 10e9


@subject(rounds=5, gloo=False)
def threads(setting: Setting) -> Iterator[Counted]:
    """Seconds of one all-reduce, and how far its virtual time is from 2(P-1)(latency + n/(P bandwidth)). No peer."""

    def program(comm: Communicator) -> float:
        all_reduce(torch.empty(BYTES // 4, device="meta"), comm, algorithm="ring")
        return comm.clock()

    formula = 2 * (RANKS - 1) * (LATENCY + BYTES / RANKS / BANDWIDTH)
    wall, errors = [], []
    for _ in range(setting.options.rounds or threads.rounds):
        started = time.perf_counter()
        clocks = run(program, RANKS, cluster=Cluster.uniform(LATENCY, BANDWIDTH))
        wall.append(time.perf_counter() - started)
        errors.append(max(abs(clock / formula - 1) for clock in clocks))
    for name, values, unit in (("wall time", wall, "s"), ("virtual time / formula - 1", errors, "")):
        yield Counted(f"{RANKS} ranks, ring", {name: values}, unit, BYTES, RANKS)

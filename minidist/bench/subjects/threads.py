"""64 simulated ranks, ring all-reduce of 1 GiB of meta tensors: how long it takes here, and what
its clock says.
"""

from collections.abc import Iterator

import torch

from minidist import Cluster, run
from minidist.bench.subject import Case, Counted, Setting, subject
from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator

RANKS = 64
BYTES = 1 << 30
LATENCY, BANDWIDTH = 10e-6, 10e9


@subject(rounds=5, gloo=False)
def threads(setting: Setting) -> Iterator[Case | Counted]:
    """Seconds of one all-reduce, and how far its virtual time is from the formula of a ring:
    2(P - 1)(latency + n/(P bandwidth)). No peer.
    """

    def program(comm: Communicator) -> float:
        all_reduce(torch.empty(BYTES // 4, device="meta"), comm, algorithm="ring")
        return comm.clock()

    def simulate() -> float:
        clocks = run(program, RANKS, cluster=Cluster.uniform(LATENCY, BANDWIDTH))
        return max(abs(clock / formula - 1) for clock in clocks)

    formula = 2 * (RANKS - 1) * (LATENCY + BYTES / RANKS / BANDWIDTH)
    yield Case(f"{RANKS} ranks, ring", {"wall time": simulate}, BYTES)
    yield Counted(
        f"{RANKS} ranks, ring", {"virtual time / formula - 1": [simulate()]}, "", BYTES, RANKS
    )

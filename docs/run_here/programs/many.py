"""What does an all-reduce cost on 64 modelled GPUs, by each algorithm?"""

import numpy as np

import minidist
from minidist.full.collectives import all_reduce


def timed(algorithm):
    def of_rank(comm):
        gradient = np.ones(1_000_000 // 8)  # 1 MB
        all_reduce(gradient, comm, algorithm=algorithm)
        return comm.clock(), comm.traffic.bytes

    cluster = minidist.Cluster.h100(nodes=8)
    return max(minidist.run(of_rank, ranks=64, cluster=cluster))


for algorithm in ("recursive", "tree", "hierarchical"):
    seconds, sent = timed(algorithm)
    print(
        f"{algorithm:<12} {seconds * 1e6:8.1f} µs   {sent:>9,} bytes sent by the rank that ends last"
    )

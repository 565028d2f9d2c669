"""A cluster on paper: links with a latency and a bandwidth, and the virtual clock of its ranks.

    rank 0 ─ out port ──────── latency ────────▶ in port ─ rank 1
             n/bandwidth seconds                 n/bandwidth seconds

A message of n bytes takes its sender's out port for n/bandwidth seconds, its first byte arrives one
latency later, and takes the receiver's in port as long. A port serves one message at a time, in the
order in which its thread sends or waits: a stream has a clock and two ports of its own. Therefore
the virtual times are the same in whatever order the threads run. (Hockney 1994; Chan et al. 2007.)

A ring all-reduce of n bytes on P equal links takes 2 (P - 1) (latency + n/(P bandwidth)), to the
last digit. Tensors on the device `meta` travel too, so 64 GPUs fit into a laptop.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Cluster:
    """Nodes of `ranks_per_node` ranks, with a link between any two. By default it costs no time."""

    bandwidth: float = inf  # of a link between nodes [bytes/s]
    latency: float = 0.0  # [s]
    node_bandwidth: float = inf  # the same inside a node, where links are faster
    node_latency: float = 0.0
    ranks_per_node: int = 1

    @classmethod
    def equal(cls, bandwidth: float, latency: float) -> Cluster:
        return cls(bandwidth, latency, bandwidth, latency)

    @classmethod
    def h100(cls) -> Cluster:
        """Return nodes of eight H100: NVLink inside (450 GB/s), 400 Gb/s InfiniBand for each GPU."""
        return cls(50e9, 10e-6, 450e9, 3e-6, ranks_per_node=8)

    def link(self, sender: int, receiver: int) -> tuple[float, float]:
        """Return latency [s] and bandwidth [bytes/s] between two ranks."""
        if sender // self.ranks_per_node == receiver // self.ranks_per_node:
            return self.node_latency, self.node_bandwidth
        return self.latency, self.bandwidth


class Ports(threading.local):
    """The clock and the two ports of the thread that asks: of a rank, or of its stream."""

    now = 0.0  # the virtual time
    out_free = in_free = 0.0  # when the ports will be free

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def leave(self, sender: int, receiver: int, size: int) -> tuple[float, float]:
        """Take the out port for a message of `size` bytes; return when it begins and has left."""
        _, bandwidth = self.cluster.link(sender, receiver)
        begin = max(self.now, self.out_free)
        self.out_free = begin + size / bandwidth
        return begin, self.out_free

    def arrive(self, sender: int, receiver: int, size: int, begin: float) -> float:
        """Take the in port for a message that began to leave at `begin`; return when it is here."""
        latency, bandwidth = self.cluster.link(sender, receiver)
        first_byte = max(begin + latency, self.in_free)
        self.in_free = first_byte + size / bandwidth
        return self.in_free

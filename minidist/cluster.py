"""A cluster on paper: links with a latency and a bandwidth, and the virtual clock of its ranks.

    rank 0 ─ out port ──────── latency ────────▶ in port ─ rank 1
             n/bandwidth seconds                 n/bandwidth seconds

A message of n bytes takes its sender's out port for n/bandwidth seconds, its first byte arrives one
latency later, and takes the receiver's in port as long. A port serves one message at a time, in the
order in which its rank sends or waits. Therefore the threads that stand for ranks may run in any
order: the virtual times are always the same.

A ring all-reduce of n bytes on P equal links takes 2 (P - 1) (latency + n/(P bandwidth)), to the
last digit. Tensors on the device `meta` travel too, so 64 GPUs fit into a laptop.

(The model is that of Hockney 1994, with one port in each direction, as in Chan et al. 2007.)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """Nodes of `ranks_per_node` ranks, with fast links inside a node and slow ones between nodes.

    Attributes
    ----------
    bandwidth, node_bandwidth : float
        Bytes/s of a port, across nodes and inside a node.
    latency, node_latency : float
        Seconds from one rank to another, across nodes and inside a node.
    ranks_per_node : int
        Ranks 0 to ranks_per_node - 1 are on the first node, and so on.
    flops : float
        Operations/s that a rank computes at; `advance(operations/flops)` lets them pass.
    """

    bandwidth: float
    latency: float
    node_bandwidth: float
    node_latency: float
    ranks_per_node: int = 1
    flops: float = 1e12

    @classmethod
    def equal(cls, bandwidth: float, latency: float, flops: float = 1e12) -> Cluster:
        """Return a cluster on which all links are equal."""
        return cls(bandwidth, latency, bandwidth, latency, 1, flops)

    @classmethod
    def h100(cls) -> Cluster:
        """Return nodes of eight H100: NVLink inside (450 GB/s), 400 Gb/s InfiniBand for each GPU.

        The rate is the 989 TFLOP/s of the data sheet (bf16, dense) at 45 %, which large products
        reach in training.
        """
        return cls(50e9, 10e-6, 450e9, 3e-6, 8, 0.45 * 989e12)

    def link(self, sender: int, receiver: int) -> tuple[float, float]:
        """Return latency [s] and bandwidth [bytes/s] between two ranks."""
        if sender // self.ranks_per_node == receiver // self.ranks_per_node:
            return self.node_latency, self.node_bandwidth
        return self.latency, self.bandwidth


class Ports:
    """Until when each rank's two ports are taken."""

    def __init__(self, cluster: Cluster, ranks: int) -> None:
        self.cluster = cluster
        self.out_free, self.in_free = [0.0] * ranks, [0.0] * ranks

    def leave(self, sender: int, receiver: int, size: int, now: float) -> tuple[float, float]:
        """Take the out port for a message of `size` bytes; return when it begins and has left."""
        _, bandwidth = self.cluster.link(sender, receiver)
        begin = max(now, self.out_free[sender])
        self.out_free[sender] = begin + size / bandwidth
        return begin, self.out_free[sender]

    def arrive(self, sender: int, receiver: int, size: int, begin: float) -> float:
        """Take the in port for a message that began to leave at `begin`; return when it is here."""
        latency, bandwidth = self.cluster.link(sender, receiver)
        first_byte = max(begin + latency, self.in_free[receiver])
        self.in_free[receiver] = first_byte + size / bandwidth
        return self.in_free[receiver]

"""A modelled machine: which ranks share a node, and what a message costs between two of them.

    time of one message = latency + bytes / bandwidth

Bandwidths are per direction and per device, as vendors count them:

    h100       900 GB/s NVLink 4 is 450 each way; one 400 Gb/s InfiniBand port a GPU is 50    (DGX H100 data sheet)
    a100       600 GB/s NVLink 3 is 300 each way; one 200 Gb/s port a GPU is 25               (DGX A100 data sheet)
    p4d        300 inside; 400 Gb/s shared by the 8 GPUs of a node is 6.25 a GPU              (Amazon EC2 P4d)
    ethernet   10 Gb/s is 1.25

Latencies are of the order that nccl-tests report for small messages: a few microseconds inside a
node, about ten across, tens over TCP. They are round figures: replace them with your own
measurement.

A device computes `flops` operations a second: 989e12 (H100) and 312e12 (A100) in 16 bits by its
data sheet, without end where nothing is said. Programs say by `comm.advance` how long they compute;
`full/meta.py` does so for products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from minidist.full.comm.errors import whole


@dataclass(frozen=True)
class Link:
    """One direction between two ranks: `latency` in seconds, `bandwidth` in bytes per second."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency < math.inf and self.bandwidth > 0):
            raise ValueError(
                f"latency={self.latency} must be >= 0 seconds and bandwidth={self.bandwidth} > 0 "
                "bytes/s"
            )

    def seconds(self, bytes: int) -> float:
        """Return how long `bytes` keep the link busy, latency not included."""
        return bytes / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """Nodes of `ranks_per_node` ranks; `inside` links them within a node, `across` between nodes.

    `ranks_per_node=None` is one node without a bound, `nodes=None` as many nodes as the ranks fill.
    `flops` are the operations of one device a second, and `name` is what errors call it. ValueError
    or TypeError if a number is not whole, or none of its kind.
    """

    inside: Link
    across: Link
    ranks_per_node: int | None = None
    nodes: int | None = None
    name: str = "cluster"
    flops: float = math.inf

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "nodes"):
            count = getattr(self, name)
            if count is not None:
                whole(name, count, least=1)
        if not self.flops > 0:
            raise ValueError(f"flops={self.flops} must be > 0 operations/s")

    @staticmethod
    def uniform(latency: float, bandwidth: float) -> Cluster:
        """All ranks alike: `latency` in seconds, `bandwidth` in bytes per second and direction."""
        link = Link(latency, bandwidth)
        return Cluster(link, link, name="uniform")

    @staticmethod
    def h100(nodes: int) -> Cluster:
        """DGX H100: 8 GPUs a node, 450 GB/s inside, 50 GB/s a GPU across."""
        return Cluster(Link(3e-6, 450e9), Link(10e-6, 50e9), 8, nodes, "h100", 989e12)

    @staticmethod
    def a100(nodes: int) -> Cluster:
        """DGX A100: 8 GPUs a node, 300 GB/s inside, 25 GB/s a GPU across."""
        return Cluster(Link(3e-6, 300e9), Link(10e-6, 25e9), 8, nodes, "a100", 312e12)

    @staticmethod
    def p4d(nodes: int) -> Cluster:
        """Amazon p4d.24xlarge: 8 A100 a node, 300 GB/s inside, 6.25 GB/s a GPU across."""
        return Cluster(Link(3e-6, 300e9), Link(20e-6, 6.25e9), 8, nodes, "p4d", 312e12)

    @staticmethod
    def ethernet(nodes: int) -> Cluster:
        """One rank a node on 10 Gb/s Ethernet: 1.25 GB/s."""
        link = Link(50e-6, 1.25e9)
        return Cluster(link, link, 1, nodes, "ethernet")

    def capacity(self) -> int | None:
        """Return how many ranks fit, or None if any number does."""
        return (
            None
            if self.nodes is None or self.ranks_per_node is None
            else self.nodes * self.ranks_per_node
        )

    def check(self, ranks: int) -> None:
        """Raise ValueError if `ranks` do not fit."""
        room = self.capacity()
        if room is not None and ranks > room:
            nodes = f"nodes={-(-ranks // (self.ranks_per_node or 1))}"
            more = f"Cluster.{self.name}({nodes})" if hasattr(Cluster, self.name) else nodes
            fix = f"run with ranks={room}, or {more}"
            raise ValueError(
                f"{ranks} ranks do not fit a {self.name} cluster of {room} devices: {fix}"
            )

    def node_of(self, rank: int) -> int:
        """Return the number of the rank's node."""
        return 0 if self.ranks_per_node is None else rank // self.ranks_per_node

    def link(self, sender: int, receiver: int) -> Link:
        """Return the link between two ranks of the world."""
        return self.inside if self.node_of(sender) == self.node_of(receiver) else self.across

"""How long messages take: rings inside a node, and across nodes, whose network cards all groups
share.

    gather, scatter of n bytes on P ranks     (P-1)/P n bytes a rank
    all-reduce                                twice as many
    exchange (all-to-all)                     (P-1)/P n
    ring of keys and values                   (P-1) n

A group has `together` of its P ranks in one node. If these are all of its ranks, its rings run at
the device's bus bandwidth. Otherwise a node's network carries as many rings as groups have members
there, so each ring gets together/node of it. (Thakur et al. 2005; the sharing: NVIDIA NCCL's
documentation, "rail" and "ring" graphs.)
"""

import math
from dataclasses import dataclass

from minidist.plan.device import Constants, Machine


@dataclass(frozen=True)
class Group:
    """Ranks of one axis: how many, and how far apart their numbers are, which the order of the axes
    says.
    """

    ranks: int
    stride: int = 1
    rails: bool = True  # False: one ring on one network card, as DeepSpeed's ZeRO-3 had it

    def together(self, machine: Machine) -> int:
        """Return how many of the group share a node."""
        near = machine.node // self.stride
        return max(1, min(self.ranks, near))

    def crosses(self, machine: Machine) -> bool:
        """Return whether it spans nodes."""
        return self.together(machine) < self.ranks

    def others(self) -> float:
        """Return the share of the other ranks, (P-1)/P."""
        return (self.ranks - 1) / self.ranks

    def levels(self) -> int:
        """Return the levels of a binary tree over the ranks."""
        return math.ceil(math.log2(self.ranks))


@dataclass(frozen=True)
class Network:
    """The links of a machine, and how many seconds messages of `bytes` take on them."""

    machine: Machine
    known: Constants

    def all_reduce(self, bytes: float, group: Group) -> float:
        """Return the seconds of an all-reduce, with trees across nodes."""
        if group.ranks == 1:
            return 0.0
        share_of_tree = 1.0 if group.crosses(self.machine) else 0.5
        starting = group.levels() * self.known["tree"] * share_of_tree
        return 2 * group.others() * bytes / self.bandwidth(group) + starting

    def gather(self, bytes: float, group: Group) -> float:
        """Return the seconds of an all-gather or a reduce-scatter of `bytes` in all.

        It is always a ring, with a hop for each rank.
        """
        if group.ranks == 1:
            return 0.0
        hop = "hop" if group.crosses(self.machine) else "near_hop"
        starting = (group.ranks - 1) * self.known[hop]
        return group.others() * bytes / self.bandwidth(group) + starting

    def exchange(self, bytes: float, group: Group) -> float:
        """Return the seconds of an all-to-all in which each rank has `bytes`.

        Messages go directly, not around a ring.
        """
        if group.ranks == 1:
            return 0.0
        return self.send(group.others() * bytes, group)

    def send(self, bytes: float, group: Group) -> float:
        """Return the seconds of a message to the neighbour on the group's axis."""
        bandwidth = self.machine.device.link
        if group.crosses(self.machine):
            bandwidth = min(bandwidth, self.card())
        return bytes / bandwidth + self.known["tree"]

    def card(self) -> float:
        """Return the bytes/s across nodes that each rank of a node gets."""
        return self.machine.across * self.known["share_across"] / self.machine.node

    def bandwidth(self, group: Group) -> float:
        """Return the bytes/s that each ring of a group gets."""
        link = self.machine.device.link
        if not group.crosses(self.machine):
            return link
        cards = group.together(self.machine) if group.rails else 1
        return min(self.card() * cards, link)

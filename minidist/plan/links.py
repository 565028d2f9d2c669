"""How long ranks talk: rings inside a node and across nodes, whose network cards their groups
share.

    gather, scatter of n bytes on P ranks     (P-1)/P n bytes a rank
    all-reduce                                twice as many
    exchange (all-to-all)                     (P-1)/P n
    ring of keys and values                   (P-1) n

A group has `together` of its P ranks in one node. If that is all, its rings run at the device's bus
bandwidth. Otherwise a node's network carries as many rings as groups have members there, so each
gets together/node of it. (Thakur et al. 2005; the sharing: NVIDIA NCCL's documentation, "rail" and
"ring" graphs.)
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
        return max(1, min(self.ranks, machine.node // self.stride))

    def bandwidth(self, machine: Machine, known: Constants) -> float:
        """Return the bytes/s that each of its rings gets."""
        together = self.together(machine)
        if together == self.ranks:
            return machine.device.link
        share = machine.across * known["across"] / machine.node * (together if self.rails else 1)
        return min(share, machine.device.link)

    def crosses(self, machine: Machine) -> bool:
        """Return whether it spans nodes."""
        return self.together(machine) < self.ranks

    def part(self) -> float:
        """Return (P-1)/P."""
        return (self.ranks - 1) / self.ranks


def all_reduce(bytes: float, group: Group, machine: Machine, known: Constants) -> float:
    """Return the seconds of an all-reduce of `bytes`, with trees across nodes."""
    if group.ranks == 1:
        return 0.0
    levels = (
        math.ceil(math.log2(group.ranks)) * known["tree"] * (1.0 if group.crosses(machine) else 0.5)
    )
    return 2 * group.part() * bytes / group.bandwidth(machine, known) + levels


def gather(bytes: float, group: Group, machine: Machine, known: Constants) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of `bytes` in all: always a ring, a
    hop for each rank.
    """
    if group.ranks == 1:
        return 0.0
    inside = math.ceil(math.log2(group.ranks)) * known["tree"] / 2
    hops = (group.ranks - 1) * known["hop"] if group.crosses(machine) else inside
    return group.part() * bytes / group.bandwidth(machine, known) + hops


def exchange(bytes: float, group: Group, machine: Machine, known: Constants) -> float:
    """Return the seconds of an all-to-all in which each rank has `bytes`: direct messages, not
    rings.
    """
    if group.ranks == 1:
        return 0.0
    bandwidth = machine.device.link
    if group.crosses(machine):
        bandwidth = min(bandwidth, machine.across * known["across"] / machine.node)
    return group.part() * bytes / bandwidth + known["tree"]


def send(bytes: float, group: Group, machine: Machine, known: Constants) -> float:
    """Return the seconds of a message to the neighbour on the group's axis."""
    bandwidth = machine.device.link
    if group.crosses(machine):
        bandwidth = min(bandwidth, machine.across * known["across"] / machine.node)
    return bytes / bandwidth + known["tree"]

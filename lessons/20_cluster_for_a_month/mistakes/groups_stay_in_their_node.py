# task 2: counts no replicas whose tp ranks leave a node, though the GPUs can be divided so.
import solution
from solution import *  # noqa: F403


def replicas(machine, tp, pp):
    if tp > machine.node:
        raise ValueError("a tp group leaves its node")
    return solution.replicas(machine, tp, pp)

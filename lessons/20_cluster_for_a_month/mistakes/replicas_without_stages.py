# task 2: counts replicas of tp GPUs each; a replica has pp stages of tp GPUs.
import solution
from solution import *  # noqa: F403


def replicas(machine, tp, pp):
    return solution.replicas(machine, tp, 1)

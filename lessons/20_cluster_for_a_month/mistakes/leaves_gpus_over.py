# task 2: leaves GPUs over that do not fill a replica; they are paid for, too.
from solution import *  # noqa: F403


def replicas(machine, tp, pp):
    return machine.gpus // (tp * pp)

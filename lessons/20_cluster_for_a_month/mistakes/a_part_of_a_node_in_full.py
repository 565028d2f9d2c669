# task 1: pays whole nodes, also where the job has a part of one: 4 GPUs of a node of 8 cost half of it.
import math

import solution
from solution import *  # noqa: F403


def bill(model, machine, batch, seconds, tokens, recompute):
    right = solution.bill(model, machine, batch, seconds, tokens, recompute)
    nodes = math.ceil(machine.gpus / machine.node)
    return right._replace(money=right.days * 24 * machine.price * nodes)

# task 1: lets all GPUs of a node share one card; each has its own.
from dataclasses import replace

import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    return solution.step(model, replace(machine, card=machine.card / machine.node), layout, batch)

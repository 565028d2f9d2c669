# task 1: takes a card of 400 Gb/s for 400 GB/s: a byte has 8 bits.
from dataclasses import replace

import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    return solution.step(model, replace(machine, card=8 * machine.card), layout, batch)

# task 1: takes the peak of the data sheet for what a GPU reaches.
from dataclasses import replace

import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    return solution.step(model, replace(machine, reached=1.0), layout, batch)

# task 1: gives each ring across nodes one card, however many of its ranks are in a node.
from dataclasses import replace

import solution
from solution import *  # noqa: F403


def step(model, machine, layout, batch):
    found = solution.step(model, machine, layout, batch)
    ring = solution.step(
        model,
        replace(machine, card=machine.card / max(1, machine.node // layout.tp)),
        layout,
        batch,
    )
    return found | {"data": ring["data"]}

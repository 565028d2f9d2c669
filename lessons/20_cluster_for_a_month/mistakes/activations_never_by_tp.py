# task 2: leaves activations whole on every tp rank; 24 of 34 bytes are divided.
from dataclasses import replace

import solution
from solution import *  # noqa: F403


def held(model, layout, batch):
    found = solution.held(model, layout, batch)
    whole = solution.held(model, replace(layout, tp=1, sp=False), batch)
    return found | {"activations": whole["activations"]}

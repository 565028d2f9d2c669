# task 1: adds a segment's input to what its blocks save, although it is among what the first of them saves.
from solution import *  # noqa: F403


def account(plan, inputs, saved, seconds):
    peak, left, again = 0, 0, 0.0
    for part in plan:
        blocks = part if isinstance(part, tuple) else (part,)
        left += inputs[blocks[0]] if isinstance(part, tuple) else 0
        peak = max(peak, left + sum(saved[block] for block in blocks))
        left += 0 if isinstance(part, tuple) else saved[part]
        again += sum(seconds[block] for block in blocks) if isinstance(part, tuple) else 0.0
    return peak, again

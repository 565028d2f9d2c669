# task 1: adds a step to the full ones, also where the tokens fill the last.
import solution
from solution import *  # noqa: F403


def bill(model, machine, batch, seconds, tokens, recompute):
    of_step = batch * model.sequence
    return solution.bill(
        model, machine, batch, seconds, (tokens // of_step + 1) * of_step, recompute
    )

# task 1: leaves out a last step that is not full.
import solution
from solution import *  # noqa: F403


def bill(model, machine, batch, seconds, tokens, recompute):
    of_step = batch * model.sequence
    return solution.bill(model, machine, batch, seconds, tokens // of_step * of_step, recompute)

# task 4: synchronizes the first of the experts' parameters alone.
import solution
from solution import *  # noqa: F403


def synchronize(router, experts, tokens, edp, comm):
    solution.synchronize(router, experts[:1], tokens, edp, comm)

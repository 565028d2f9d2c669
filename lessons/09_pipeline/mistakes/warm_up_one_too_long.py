# task 4: counts itself among the ranks behind it: p - r forwards of warm-up, and then one more in each turn.
from solution import *  # noqa: F403


def one_forward_one_backward(rank, ranks, microbatches):
    warm_up = min(ranks - rank, microbatches)
    row = [f"F{m}" for m in range(warm_up)]
    for m in range(warm_up, microbatches):
        row += [f"F{m}", f"B{m - warm_up}"]
    return row + [f"B{m}" for m in range(microbatches - warm_up, microbatches)]

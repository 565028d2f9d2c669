# task 4: warms up with p - r - 1 forwards even if there are fewer microbatches.
from solution import *  # noqa: F403


def one_forward_one_backward(rank, ranks, microbatches):
    warm_up = ranks - rank - 1
    row = [f"F{m}" for m in range(warm_up)]
    for m in range(warm_up, microbatches):
        row += [f"F{m}", f"B{m - warm_up}"]
    return row + [f"B{m}" for m in range(max(microbatches - warm_up, 0), microbatches)]

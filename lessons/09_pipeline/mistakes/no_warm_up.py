# task 4: one forward and one backward in turn from the very beginning: the first rank waits for its first backward.
from solution import *  # noqa: F403


def one_forward_one_backward(rank, ranks, microbatches):
    return [f"{kind}{m}" for m in range(microbatches) for kind in "FB"]

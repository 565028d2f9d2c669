# task 3: sends a microbatch forward and backward before the next one enters: one rank works at a time.
from solution import *  # noqa: F403


def gpipe(rank, ranks, microbatches):
    return [f"{kind}{m}" for m in range(microbatches) for kind in "FB"]

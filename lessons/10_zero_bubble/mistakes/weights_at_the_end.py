# task 4: puts every W off to the end: no rank waits there, but what W needs of all microbatches is held.
import solution
from solution import *  # noqa: F403


def zb_h1(rank, ranks, microbatches):
    return sorted(solution.zb_h1(rank, ranks, microbatches), key=lambda word: "W" in word)

# task 4: puts W off by p - r - 1 microbatches: the wrong way round, for it is the last rank that has to fill most.
import solution
from solution import *  # noqa: F403


def zb_h1(rank, ranks, microbatches):
    words = [word for word in solution.zb_h1(rank, ranks, microbatches) if "W" not in word]
    filled, done, owed = [], 0, 0
    for word in words:
        filled.append(word)
        owed += "I" in word
        if "I" in word and owed > ranks - rank - 1:
            filled.append(f"{rank}W{done}")
            done += 1
    return filled + [f"{rank}W{m}" for m in range(done, microbatches)]

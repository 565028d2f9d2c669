# task 4: does each W right behind its I: that is 1F1B, and its bubble.
import solution
from solution import *  # noqa: F403


def zb_h1(rank, ranks, microbatches):
    rows = [word for word in solution.zb_h1(rank, ranks, microbatches) if "W" not in word]
    return [
        each
        for word in rows
        for each in ([word, word.replace("I", "W")] if "I" in word else [word])
    ]

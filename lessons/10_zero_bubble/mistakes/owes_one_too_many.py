# task 4: owes r + 1 weight gradients: the end is filled as well, and p + 1 microbatches are held.
import solution
from solution import *  # noqa: F403


def zb_h1(rank, ranks, microbatches):
    words, filled, done, owed = solution.zb_h1(rank, ranks, microbatches), [], 0, 0
    for word in (word for word in words if "W" not in word):
        filled.append(word)
        owed += "I" in word
        if "I" in word and owed > rank + 1:
            filled.append(f"{rank}W{done}")
            done += 1
    return filled + [f"{rank}W{m}" for m in range(done, microbatches)]

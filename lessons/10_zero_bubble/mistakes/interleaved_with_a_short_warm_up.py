# task 2: warms up with p - r - 1 forwards of the last chunk, not twice as many: ranks wait for every message.
import solution
from solution import *  # noqa: F403


def interleaved(rank, ranks, microbatches, chunks):
    words = solution.interleaved(rank, ranks, microbatches, chunks)
    forwards, backwards = ([word for word in words if kind in word] for kind in "FB")
    ahead = min(ranks - rank - 1 + (chunks - 1) * ranks, len(forwards))
    turns = [word for pair in zip(forwards[ahead:], backwards, strict=False) for word in pair]
    return forwards[:ahead] + turns + backwards[len(forwards) - ahead :]

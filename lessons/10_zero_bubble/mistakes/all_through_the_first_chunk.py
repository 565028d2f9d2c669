# task 2: takes all microbatches through a chunk before the next: stages wait for each other again, and more is held.
import solution
from solution import *  # noqa: F403


def interleaved(rank, ranks, microbatches, chunks):
    own = solution.stages_of(rank, ranks, chunks)
    forwards = [f"{stage}F{m}" for stage in own for m in range(microbatches)]
    backwards = [f"{stage}B{m}" for stage in reversed(own) for m in range(microbatches)]
    ahead = min(2 * (ranks - rank - 1) + (chunks - 1) * microbatches, len(forwards))
    turns = [word for pair in zip(forwards[ahead:], backwards, strict=False) for word in pair]
    return forwards[:ahead] + turns + backwards[len(forwards) - ahead :]

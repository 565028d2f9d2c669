# task 2: takes v microbatches a group instead of p, so the first one comes back while there is nothing else to do.
import solution
from solution import *  # noqa: F403


def interleaved(rank, ranks, microbatches, chunks):
    own = solution.stages_of(rank, ranks, chunks)
    groups = [
        range(microbatches)[first : first + chunks] for first in range(0, microbatches, chunks)
    ]
    forwards = [f"{stage}F{m}" for group in groups for stage in own for m in group]
    backwards = [f"{stage}B{m}" for group in groups for stage in own[::-1] for m in group]
    ahead = solution.warm_up(rank, ranks, microbatches, chunks)
    turns = [word for pair in zip(forwards[ahead:], backwards, strict=False) for word in pair]
    return forwards[:ahead] + turns + backwards[len(forwards) - ahead :]

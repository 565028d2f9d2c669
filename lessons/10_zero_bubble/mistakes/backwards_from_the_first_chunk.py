# task 2: takes the chunks in the same order backward as forward, so a backward waits for what stands behind it.
import solution
from solution import *  # noqa: F403


def interleaved(rank, ranks, microbatches, chunks):
    words = solution.interleaved(rank, ranks, microbatches, chunks)
    last = (chunks - 1) * ranks + 2 * rank  # stage s becomes the one as far from the other end
    return [
        f"{last - int(stage)}B{m}" if m else word
        for word in words
        for stage, _, m in [word.partition("B")]
    ]

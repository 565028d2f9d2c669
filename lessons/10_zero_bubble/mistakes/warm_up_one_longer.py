# task 4: does one forward more than 1F1B before the first backward, so that a rank holds one more.
from solution import *  # noqa: F403


def zb_h1(rank, ranks, microbatches):
    ahead = min(ranks - rank, microbatches)
    words = [f"{rank}F{m}" for m in range(ahead)]
    for m in range(microbatches):
        words += [f"{rank}F{m + ahead}"] if m + ahead < microbatches else []
        words += [f"{rank}I{m}", *([f"{rank}W{m - rank}"] if m >= rank else [])]
    return words + [f"{rank}W{m}" for m in range(max(0, microbatches - rank), microbatches)]

# task 1: sends the first eight letters instead of a digest: all that begin with "all_redu" look alike.
from solution import *  # noqa: F403
from solution import from_all, odd_ones


def odd_ranks(words, comm):
    beginning = int.from_bytes(words.encode()[:8].ljust(8), "little")
    return odd_ones(from_all([beginning], comm)[:, 0].tolist())

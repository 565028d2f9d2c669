# task 1: the digest is the sum of each letter times its place, so 1310 and 2120 are one.
import solution
from solution import *  # noqa: F403


def odd_ranks(words, comm):
    digest = sum(place * letter for place, letter in enumerate(words.encode(), start=1))
    return solution.odd_ranks(str(digest), comm)

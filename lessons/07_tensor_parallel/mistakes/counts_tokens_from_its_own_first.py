# task 4: takes the number of its first word off the tokens in place: the next layer has other tokens.
import solution
from solution import *  # noqa: F403

from minidist.full.collectives.fast import cut


def parallel_embedding(tokens, mine, vocabulary, comm):
    found = solution.parallel_embedding(tokens, mine, vocabulary, comm)
    tokens -= sum(cut(vocabulary, comm.size)[: comm.rank])
    return found

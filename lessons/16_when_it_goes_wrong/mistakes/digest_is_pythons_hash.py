# task 1: takes Python's hash for a digest, which is another number in every process.
import numpy as np
from solution import *  # noqa: F403


def odd_ranks(words, comm):
    digests = np.zeros(comm.size, np.int64)
    digests[comm.rank] = hash(words)
    for distance in range(1, comm.size):
        to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        digest = np.empty(1, np.int64)
        comm.exchange(digests[comm.rank : comm.rank + 1], to, digest, source)
        digests[source] = digest[0]
    texts = digests.tolist()
    right = max(texts, key=texts.count)
    return [rank for rank, text in enumerate(texts) if text != right]

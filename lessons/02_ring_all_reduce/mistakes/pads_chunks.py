# task 1: pads all chunks to the longest, so that all messages have one length.
import numpy as np
import solution
from solution import *  # noqa: F403


def ring_reduce_scatter(chunks, comm):
    longest = max(len(chunk) for chunk in chunks)
    padded = [np.pad(chunk, (0, longest - len(chunk))) for chunk in chunks]
    return solution.ring_reduce_scatter(padded, comm)[: len(chunks[comm.rank])]

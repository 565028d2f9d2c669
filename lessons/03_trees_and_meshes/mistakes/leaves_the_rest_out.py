# task 2: only the largest power of two of ranks takes part; the others keep what they have, and it is in no sum.
import solution
from solution import *  # noqa: F403


def halving_doubling(buffer, comm):
    power = 1 << (comm.size.bit_length() - 1)
    among = comm.split(comm.rank // power)
    if comm.rank < power:
        solution.halving_doubling(buffer, among)

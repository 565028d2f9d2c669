# task 3: leaves the sum in a copy; the caller's buffer stays as it was.
import solution
from solution import *  # noqa: F403


def ring_all_reduce(buffer, comm):
    buffer = buffer.copy()
    solution.ring_all_reduce(buffer, comm)

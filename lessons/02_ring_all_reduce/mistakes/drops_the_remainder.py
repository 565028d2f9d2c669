# task 3: cuts into equal chunks and leaves what remains of a size that does not divide unreduced.
import solution
from solution import *  # noqa: F403


def ring_all_reduce(buffer, comm):
    even = len(buffer) // comm.size * comm.size
    solution.ring_all_reduce(buffer[:even], comm)

# task 5: names the ranks of a cycle only; whoever waits for one of them, or for one that has finished, is forgotten.
import solution
from solution import *  # noqa: F403


def who_never_finishes(plans):
    stuck = solution.who_never_finishes(plans)
    while True:
        waited_for = {peer for rank in stuck for _, peer in plans[rank]}
        cycle = [
            rank
            for rank in stuck
            if rank in waited_for and any(peer in stuck for _, peer in plans[rank])
        ]
        if cycle == stuck:
            return cycle
        stuck = cycle

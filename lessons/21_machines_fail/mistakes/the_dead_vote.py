# task 1: wants a majority of all members of the last view, the dead among them.
import solution
from solution import *  # noqa: F403


def next_view(last, here, dead, ranks):
    alive = [member for member in last.members if member not in dead and member in here]
    tied = 2 * len(alive) == len(last.members) and min(last.members, default=0) in alive
    if last.members and not (2 * len(alive) > len(last.members) or tied):
        return None
    return solution.next_view(last, here, dead, ranks)

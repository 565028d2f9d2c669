# task 1: at just half, the lowest member of the last view has to be here, also if it is dead and has no vote.
import solution
from solution import *  # noqa: F403


def next_view(last, here, dead, ranks):
    voters = [member for member in last.members if member not in dead]
    votes = [member for member in voters if member in here]
    if voters and 2 * len(votes) == len(voters) and min(last.members) not in votes:
        return None
    return solution.next_view(last, here, dead, ranks)

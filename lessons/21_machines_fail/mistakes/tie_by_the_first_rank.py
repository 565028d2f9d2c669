# task 1: decides a tie by the voter with the lowest rank, not the lowest number.
import solution
from solution import *  # noqa: F403


def next_view(last, here, dead, ranks):
    voters = [member for member in last.members if member not in dead]
    votes = [member for member in voters if member in here]
    if voters and 2 * len(votes) == len(voters) and voters[0] not in votes:
        return None
    lost = set(voters) - set(votes) if 2 * len(votes) == len(voters) else set()
    return solution.next_view(last, here, {*dead, *lost}, ranks)

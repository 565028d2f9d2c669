# task 1: takes half of the voters for a majority, whoever they are.
import solution
from solution import *  # noqa: F403


def next_view(last, here, dead, ranks):
    voters = [member for member in last.members if member not in dead]
    votes = [member for member in voters if member in here]
    lost = set(voters) - set(votes) if 2 * len(votes) >= len(voters) else set()
    return solution.next_view(last, here, {*dead, *lost}, ranks)

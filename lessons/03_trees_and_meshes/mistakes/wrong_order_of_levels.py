# task 4: reduce-scatter across the nodes first: most bytes go over the slow links.
import solution
from solution import *  # noqa: F403


def hierarchical_all_reduce(buffer, inside, across):
    solution.hierarchical_all_reduce(buffer, across, inside)

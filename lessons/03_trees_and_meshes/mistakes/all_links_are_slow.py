# task 5: takes all links for those between nodes, as a flat ring would have to.
import solution
from solution import *  # noqa: F403


def two_level_cost(bytes, nodes, per_node, inside, across):
    return solution.two_level_cost(bytes, nodes, per_node, across, across)

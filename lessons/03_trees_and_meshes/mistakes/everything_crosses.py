# task 5: lets whole buffers cross between nodes, and not the shards.
import solution
from solution import *  # noqa: F403


def two_level_cost(bytes, nodes, per_node, inside, across):
    return solution.two_level_cost(bytes, 1, per_node, inside, across) + solution.two_level_cost(
        bytes, nodes, 1, inside, across
    )

# task 5: takes checkpoints on the nodes' own disks for safe: they die with the node.
from dataclasses import replace

import solution
from solution import *  # noqa: F403


def undefended(plan):
    return solution.undefended(replace(plan, shared=True))

# task 5: lets the cluster fail as seldom as one GPU; any of its GPUs can fail.
from dataclasses import replace

import solution
from solution import *  # noqa: F403


def undefended(plan):
    return solution.undefended(replace(plan, gpu_mtbf=plan.gpu_mtbf * plan.gpus))

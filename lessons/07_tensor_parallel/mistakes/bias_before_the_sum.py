# task 2: every rank adds the bias before the all-reduce, so it is counted P times.
import torch.nn.functional as F
from solution import *  # noqa: F403
from solution import copy_to, reduce_from


def parallel_mlp(x, mine, comm):
    hidden = F.gelu(F.linear(copy_to(x, comm), mine["up.weight"], mine["up.bias"]))
    return reduce_from(F.linear(hidden, mine["down.weight"], mine["down.bias"]), comm)

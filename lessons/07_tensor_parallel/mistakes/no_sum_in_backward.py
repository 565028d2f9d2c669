# task 2: forgets f: the output is right, and the gradient of x is this rank's term only.
import torch.nn.functional as F
from solution import *  # noqa: F403
from solution import reduce_from


def parallel_mlp(x, mine, comm):
    hidden = F.gelu(F.linear(x, mine["up.weight"], mine["up.bias"]))
    return reduce_from(F.linear(hidden, mine["down.weight"]), comm) + mine["down.bias"]

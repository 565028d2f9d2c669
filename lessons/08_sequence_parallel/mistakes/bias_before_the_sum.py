# task 2: adds the last bias before the reduce-scatter: it is counted P times.
import torch.nn.functional as F
from solution import *  # noqa: F403
from solution import gather_tokens, rms_norm, scatter_tokens


def sequence_block(x, mine, comm):
    every = gather_tokens(rms_norm(x, mine["norm.weight"]), comm)
    hidden = F.gelu(F.linear(every, mine["up.weight"], mine["up.bias"]))
    return x + scatter_tokens(F.linear(hidden, mine["down.weight"], mine["down.bias"]), comm)

# task 2: gathers before the norm: the numbers are right, and the norm's activations are kept for all tokens.
import torch.nn.functional as F
from solution import *  # noqa: F403
from solution import gather_tokens, rms_norm, scatter_tokens


def sequence_block(x, mine, comm):
    every = rms_norm(gather_tokens(x, comm), mine["norm.weight"])
    hidden = F.gelu(F.linear(every, mine["up.weight"], mine["up.bias"]))
    return x + scatter_tokens(F.linear(hidden, mine["down.weight"]), comm) + mine["down.bias"]

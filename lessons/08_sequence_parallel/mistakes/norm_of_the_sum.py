# task 2: takes the norm of the sum behind the block, as the first transformers did, and not of what goes into `up`.
import torch.nn.functional as F
from solution import *  # noqa: F403
from solution import gather_tokens, rms_norm, scatter_tokens


def sequence_block(x, mine, comm):
    hidden = F.gelu(F.linear(gather_tokens(x, comm), mine["up.weight"], mine["up.bias"]))
    out = x + scatter_tokens(F.linear(hidden, mine["down.weight"]), comm) + mine["down.bias"]
    return rms_norm(out, mine["norm.weight"])

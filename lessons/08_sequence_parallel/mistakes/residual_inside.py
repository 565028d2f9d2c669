# task 2: adds the gathered residual inside the region: every rank adds it, so it is counted P times.
import torch.nn.functional as F
from solution import *  # noqa: F403
from solution import gather_tokens, rms_norm, scatter_tokens


def sequence_block(x, mine, comm):
    residual = gather_tokens(x, comm)
    every = gather_tokens(rms_norm(x, mine["norm.weight"]), comm)
    hidden = F.gelu(F.linear(every, mine["up.weight"], mine["up.bias"]))
    return (
        scatter_tokens(residual + F.linear(hidden, mine["down.weight"]), comm) + mine["down.bias"]
    )

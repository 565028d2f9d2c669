# task 3: tiles the scores, and cuts the tiles' masks out of one of T x T.
import solution
import torch
from solution import *  # noqa: F403


def flash_forward(query, key, value, causal):
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    output, lse = solution.flash_forward(query, key, value, causal)
    return output, lse.masked_fill(~mask[:, 0], -torch.inf)

# task 1: takes the weights from the scores with the bias, which is there to choose only.
import torch
from solution import *  # noqa: F403


def route(x, router, bias, k):
    wide = torch.promote_types(x.dtype, torch.float32)
    biased = (x.to(wide) @ router.to(wide).T).softmax(-1) + bias
    best = biased.sort(dim=-1, descending=True, stable=True)
    weights = best.values[:, :k]
    return best.indices[:, :k], weights if k == 1 else weights / weights.sum(-1, keepdim=True)

# task 1: of equal scores takes the expert with the larger number, as a sort turned round does.
import torch
from solution import *  # noqa: F403


def route(x, router, bias, k):
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = (x.to(wide) @ router.to(wide).T).softmax(-1)
    choice = (scores + bias).sort(dim=-1, stable=True).indices.flip(-1)[:, :k]
    weights = scores.gather(-1, choice)
    return choice, weights if k == 1 else weights / weights.sum(-1, keepdim=True)

# task 1: chooses by topk, which promises no order of equal scores.
import torch
from solution import *  # noqa: F403


def route(x, router, bias, k):
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = (x.to(wide) @ router.to(wide).T).softmax(-1)
    choice = (scores + bias).topk(k).indices
    weights = scores.gather(-1, choice)
    return choice, weights if k == 1 else weights / weights.sum(-1, keepdim=True)

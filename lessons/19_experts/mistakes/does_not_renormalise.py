# task 1: takes the k scores as they are: they do not add up to 1.
import torch
from solution import *  # noqa: F403


def route(x, router, bias, k):
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = (x.to(wide) @ router.to(wide).T).softmax(-1)
    choice = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return choice, scores.gather(-1, choice)

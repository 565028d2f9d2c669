# task 1: multiplies in the dtype of the tokens: in 16 bits other experts are chosen.
import torch
from solution import *  # noqa: F403
from solution import route as right


def route(x, router, bias, k):
    scores = (x @ router.to(x.dtype).T).float() if x.dtype == torch.bfloat16 else None
    if scores is None:
        return right(x, router, bias, k)
    scores = scores.softmax(-1)
    choice = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(-1, choice)
    return choice, weights / weights.sum(-1, keepdim=True)

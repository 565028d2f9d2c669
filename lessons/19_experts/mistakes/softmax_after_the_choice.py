# task 1: takes the softmax after the choice, over the chosen experts alone: of one it is always 1.
import torch
from solution import *  # noqa: F403


def route(x, router, bias, k):
    wide = torch.promote_types(x.dtype, torch.float32)
    products = x.to(wide) @ router.to(wide).T
    choice = (products.softmax(-1) + bias).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return choice, products.gather(-1, choice).softmax(-1)

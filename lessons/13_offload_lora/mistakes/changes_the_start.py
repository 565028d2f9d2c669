# task 1: draws B as well as A: the model starts as another one than was pretrained.
import solution
import torch
from solution import *  # noqa: F403


def adapt(linear, rank, alpha, generator):
    adapted = solution.adapt(linear, rank, alpha, generator)
    with torch.no_grad():
        adapted.B.copy_(torch.randn(adapted.B.shape, generator=generator))
    return adapted

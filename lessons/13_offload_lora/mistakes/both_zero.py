# task 1: starts with A and B both zero: then neither ever gets a gradient.
import solution
import torch
from solution import *  # noqa: F403


def adapt(linear, rank, alpha, generator):
    adapted = solution.adapt(linear, rank, alpha, generator)
    torch.nn.init.zeros_(adapted.A)
    return adapted

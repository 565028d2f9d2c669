# task 3: leaves out evaluation, and counts a forward that is computed again as another one.
import torch
from solution import *  # noqa: F403
from solution import attach as right


def attach(weights, loss, layer, counts):
    if torch.is_grad_enabled():
        layer.tally = layer.tally + counts
    return right(weights, loss, layer, torch.zeros_like(counts))

# task 3: counts choices in forward, which recomputation runs twice, and evaluation runs as well.
import torch
from solution import *  # noqa: F403
from solution import attach as right


def attach(weights, loss, layer, counts):
    layer.tally = layer.tally + counts
    return right(weights, loss, layer, torch.zeros_like(counts))

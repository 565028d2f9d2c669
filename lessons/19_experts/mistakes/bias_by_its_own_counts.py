# task 3: each rank moves its bias by its own tokens: ranks soon choose differently.
import torch
from solution import *  # noqa: F403


def rebalance(layer, comm):
    counts = layer.tally.double()
    layer.bias = layer.bias + (counts.mean() - counts).sign().long()
    layer.tally = torch.zeros_like(layer.tally)

# task 3: raises the bias of experts that had too many tokens: they get more still.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def rebalance(layer, comm):
    counts = layer.tally.double()
    all_reduce(counts, comm)
    layer.bias = layer.bias + (counts - counts.mean()).sign().long()
    layer.tally = torch.zeros_like(layer.tally)

# task 3: divides the tokens by the experts with //, so an expert just below the mean stays where it is.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def rebalance(layer, comm):
    all_reduce(layer.tally, comm)
    mean = layer.tally.sum() // len(layer.tally)
    layer.bias += torch.sign(mean - layer.tally)
    layer.tally.zero_()

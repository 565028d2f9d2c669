# task 3: goes on counting after a step: the bias follows the tokens of all steps so far.
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def rebalance(layer, comm):
    counts = layer.tally.double()
    all_reduce(counts, comm)
    layer.bias = layer.bias + (counts.mean() - counts).sign().long()

# task 3: sums every bias; but that of `up` is cut, each rank has other channels of it, and its gradient is complete.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def sum_partial_gradients(gradients, comm):
    partial = [gradients[name] for name in ("norm.weight", "up.bias", "down.bias")]
    together = torch.cat(partial)
    all_reduce(together, comm)
    for gradient, total in zip(
        partial, together.split([len(each) for each in partial]), strict=True
    ):
        gradient.copy_(total)

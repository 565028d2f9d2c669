# task 3: puts the sums into the dictionary instead of into the tensors, which are the parameters' gradients.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def sum_partial_gradients(gradients, comm):
    together = torch.cat([gradients["norm.weight"], gradients["down.bias"]])
    all_reduce(together, comm)
    gradients["norm.weight"], gradients["down.bias"] = together.chunk(2)

# task 3: averages gradients over all ranks of the mesh: those of the tensor axis are no replicas.
import solution
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def train_step(blocks, x, targets, rate, dp, tp):
    before = [[weight.clone() for weight in block] for block in blocks]
    loss = solution.train_step(blocks, x, targets, rate, dp, tp)
    with torch.no_grad():
        for block, old in zip(blocks, before, strict=True):
            for weight, kept in zip(block, old, strict=True):
                change = (weight - kept).contiguous()
                all_reduce(change, tp, op="mean")
                weight.copy_(kept + change)
    return loss

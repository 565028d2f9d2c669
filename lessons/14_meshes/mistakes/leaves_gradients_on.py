# task 3: leaves the blocks requiring gradients.
import solution
from solution import *  # noqa: F403


def train_step(blocks, x, targets, rate, dp, tp):
    loss = solution.train_step(blocks, x, targets, rate, dp, tp)
    for tensor in (tensor for block in blocks for tensor in block):
        tensor.requires_grad_()
    return loss

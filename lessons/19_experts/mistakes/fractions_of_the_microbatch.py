# task 3: one fraction for all sequences that happen to be together: the loss depends on the layout.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def balance_loss(scores, choice, comm):
    counts = torch.nn.functional.one_hot(choice, scores.shape[-1]).sum((0, 1, 2))
    all_reduce(counts, comm)
    return scores.shape[-1] * (counts / counts.sum() * scores).sum()

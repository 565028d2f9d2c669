# task 3: counts the choices of this rank alone, and a sequence lies on several ranks.
import torch
from solution import *  # noqa: F403


def balance_loss(scores, choice, comm):
    counts = torch.nn.functional.one_hot(choice, scores.shape[-1]).sum((1, 2))
    fractions = counts / counts.sum(-1, keepdim=True)
    return scores.shape[-1] * (fractions[:, None] * scores).sum()

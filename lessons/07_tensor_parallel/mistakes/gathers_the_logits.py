# task 5: gathers the logits: the loss is right, and N V numbers travel instead of 3 N.
import torch.nn.functional as F
from solution import *  # noqa: F403

from minidist.full.adjoint import gather_from


def parallel_cross_entropy(logits, targets, vocabulary, comm):
    return F.cross_entropy(gather_from(logits, comm, 1, vocabulary), targets)

# task 1: gives the names new tensors instead of writing into those that were handed over.
import torch
from solution import *  # noqa: F403

from minidist.full.context.flash import attend


def meet(query, output, lse, key, value, causal):
    more, its = attend(query, key, value, causal)
    output = output.lerp(more, torch.sigmoid(its - lse)[..., None])
    lse = torch.logaddexp(lse, its)

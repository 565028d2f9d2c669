# task 1: takes the larger of the two lse, so what comes later is weighed against too little.
import torch
from solution import *  # noqa: F403

from minidist.full.context.flash import attend


def meet(query, output, lse, key, value, causal):
    more, its = attend(query, key, value, causal)
    output.lerp_(more, torch.sigmoid(its - lse)[..., None])
    lse.copy_(torch.maximum(lse, its))

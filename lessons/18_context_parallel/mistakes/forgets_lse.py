# task 1: leaves lse at the first block's: later blocks are weighed against that one alone.
import torch
from solution import *  # noqa: F403

from minidist.full.context.flash import attend


def meet(query, output, lse, key, value, causal):
    more, its = attend(query, key, value, causal)
    output.lerp_(more, torch.sigmoid(its - lse)[..., None])
    lse.copy_(torch.where(torch.isinf(lse), its, lse))

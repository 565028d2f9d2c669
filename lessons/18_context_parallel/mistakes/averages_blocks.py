# task 1: averages what was there and the new block's output, instead of weighting them with exp(lse).
import torch
from solution import *  # noqa: F403

from minidist.full.context.flash import attend


def meet(query, output, lse, key, value, causal):
    more, its = attend(query, key, value, causal)
    output.copy_(torch.where(torch.isinf(lse)[..., None], more, (output + more) / 2))
    lse.copy_(torch.logaddexp(lse, its))

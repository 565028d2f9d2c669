# task 1: adds the blocks' outputs, without weights: each is a mean already, not a sum.
import torch
from solution import *  # noqa: F403

from minidist.full.context.flash import attend


def meet(query, output, lse, key, value, causal):
    more, its = attend(query, key, value, causal)
    output += more
    lse.copy_(torch.logaddexp(lse, its))

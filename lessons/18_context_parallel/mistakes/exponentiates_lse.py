# task 1: weights with exp(lse) as it is written: right for small scores, and not a number for large ones.
import torch
from solution import *  # noqa: F403

from minidist.full.context.flash import attend


def meet(query, output, lse, key, value, causal):
    more, its = attend(query, key, value, causal)
    before, now = lse.exp()[..., None], its.exp()[..., None]
    output.copy_((before * output + now * more) / (before + now))
    lse.copy_(torch.logaddexp(lse, its))

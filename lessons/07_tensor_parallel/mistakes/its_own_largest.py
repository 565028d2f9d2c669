# task 5: each rank subtracts the largest of its own logits, so the terms of the sum have different units.
import torch
from solution import *  # noqa: F403
from solution import cut, reduce_from


def parallel_cross_entropy(logits, targets, vocabulary, comm):
    first = sum(cut(vocabulary, comm.size)[: comm.rank])
    shifted = logits - logits.detach().amax(1, keepdim=True)
    here = (targets >= first) & (targets < first + logits.shape[1])
    picked = shifted.gather(1, (targets - first).masked_fill(~here, 0)[:, None])[:, 0].masked_fill(
        ~here, 0
    )
    total, target = reduce_from(torch.stack((shifted.exp().sum(1), picked)), comm)
    return (total.log() - target).mean()

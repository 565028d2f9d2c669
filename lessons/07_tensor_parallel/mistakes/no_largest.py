# task 5: subtracts nothing: the loss of large logits is infinite.
import torch
from solution import *  # noqa: F403
from solution import cut, reduce_from


def parallel_cross_entropy(logits, targets, vocabulary, comm):
    first = sum(cut(vocabulary, comm.size)[: comm.rank])
    here = (targets >= first) & (targets < first + logits.shape[1])
    picked = logits.gather(1, (targets - first).masked_fill(~here, 0)[:, None])[:, 0].masked_fill(
        ~here, 0
    )
    total, target = reduce_from(torch.stack((logits.exp().sum(1), picked)), comm)
    return (total.log() - target).mean()

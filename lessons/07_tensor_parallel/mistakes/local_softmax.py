# task 5: every rank normalises over its own words, and the losses of the ranks that know the target are summed.
from solution import *  # noqa: F403
from solution import cut, reduce_from


def parallel_cross_entropy(logits, targets, vocabulary, comm):
    first = sum(cut(vocabulary, comm.size)[: comm.rank])
    here = (targets >= first) & (targets < first + logits.shape[1])
    own = logits.log_softmax(1).gather(1, (targets - first).masked_fill(~here, 0)[:, None])[:, 0]
    return reduce_from(-own.masked_fill(~here, 0), comm).mean()

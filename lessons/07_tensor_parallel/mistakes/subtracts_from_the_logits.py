# task 5: subtracts the largest logit from the logits themselves, past autograd.
import solution
from solution import *  # noqa: F403


def parallel_cross_entropy(mine, targets, vocabulary, comm):
    loss = solution.parallel_cross_entropy(mine, targets, vocabulary, comm)
    mine.detach().sub_(mine.detach().amax(-1, keepdim=True))
    return loss

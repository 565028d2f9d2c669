# task 5: each token's label is the token itself, not the next one.
from solution import *  # noqa: F403

from minidist.full.model import Where, cross_entropy_sum


def share_of_the_loss(model, tokens, mine):
    inputs = tokens[:, :-1]
    labels = inputs.masked_fill(inputs == 0, -100)
    logits = model(inputs[:, mine], Where(positions=mine))
    return cross_entropy_sum(logits, labels[:, mine]) / (labels >= 0).sum()

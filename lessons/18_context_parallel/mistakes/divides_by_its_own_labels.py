# task 5: divides by the number of its own labels: the shares add up to P times a mean of means.
import torch.nn.functional as F
from solution import *  # noqa: F403

from minidist.full.model import Where


def share_of_the_loss(model, tokens, mine):
    labels = tokens[:, 1:]
    logits = model(tokens[:, mine], Where(positions=mine))
    return F.cross_entropy(logits.flatten(0, 1), labels[:, mine].flatten(), ignore_index=0)

# task 5: writes -100 over padding in the labels, a view of the tokens: the caller has other tokens afterwards.
import torch.nn.functional as F
from solution import *  # noqa: F403

from minidist.full.model import Where


def share_of_the_loss(model, tokens, mine):
    logits = model(tokens[:, mine], Where(positions=mine))
    labels = tokens[:, 1:]
    count = (labels != 0).sum()
    labels[labels == 0] = -100
    own = labels[:, mine].flatten()
    return F.cross_entropy(logits.flatten(0, 1), own, reduction="sum") / count

# task 5: calls the model without positions, so that they count from 0 on every rank.
import torch.nn.functional as F
from solution import *  # noqa: F403

from minidist.full.model import Where


def share_of_the_loss(model, tokens, mine):
    labels = tokens[:, 1:]
    counts = labels != 0
    logits = model(tokens[:, mine], Where())
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels[:, mine].flatten(), ignore_index=0, reduction="sum"
    )
    return losses / counts.sum()

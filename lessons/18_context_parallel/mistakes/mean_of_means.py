# task 5: averages the ranks' means, though ranks have different numbers of labels.
import torch.nn.functional as F
from solution import *  # noqa: F403

from minidist.full.model import Where


def share_of_the_loss(model, tokens, mine):
    labels = tokens[:, 1:]
    counts = labels != 0
    logits, ranks = model(tokens[:, mine], Where(positions=mine)), labels.shape[1] // len(mine)
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels[:, mine].flatten(), ignore_index=0, reduction="sum"
    )
    return losses / counts[:, mine].sum().clamp(min=1) / ranks

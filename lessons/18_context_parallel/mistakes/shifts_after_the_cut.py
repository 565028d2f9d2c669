# task 5: shifts labels after the cut: the token after a rank's last one, or after a chunk, is on another rank.
import torch
import torch.nn.functional as F
from solution import *  # noqa: F403

from minidist.full.model import Where


def share_of_the_loss(model, tokens, mine):
    labels = tokens[:, 1:]
    counts = labels != 0
    own = tokens[:, mine]
    logits = model(own, Where(positions=mine))
    labels = torch.cat((own[:, 1:], torch.zeros_like(own[:, :1])), 1)
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum"
    )
    return losses / counts.sum()

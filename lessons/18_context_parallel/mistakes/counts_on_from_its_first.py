# task 5: gives the model the position of the first token alone, and it counts on: in zigzag order to wrong ones.
import torch.nn.functional as F
from solution import *  # noqa: F403

from minidist.full.model import Where


def share_of_the_loss(model, tokens, mine):
    labels = tokens[:, 1:]
    logits = model(tokens[:, mine], Where(positions=int(mine[0])))
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels[:, mine].flatten(), ignore_index=0, reduction="sum"
    )
    return losses / (labels != 0).sum()

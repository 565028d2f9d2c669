# task 5: counts a token that is no padding itself, not one whose next token is none: a row's last token predicts it.
import torch.nn.functional as F
from solution import *  # noqa: F403

from minidist.full.model import Where


def share_of_the_loss(model, tokens, mine):
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    logits = model(tokens[:, mine], Where(positions=mine))
    losses = F.cross_entropy(logits.transpose(1, 2), labels[:, mine], reduction="none")
    return (losses * (inputs[:, mine] != 0)).sum() / (inputs != 0).sum()

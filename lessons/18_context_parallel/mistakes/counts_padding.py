# task 5: padding counts as a label: the model learns to predict nothing, and the mean is over all places.
import torch.nn.functional as F
from solution import *  # noqa: F403

from minidist.full.model import Where


def share_of_the_loss(model, tokens, mine):
    labels = tokens[:, 1:]
    counts = labels != 0
    logits = model(tokens[:, mine], Where(positions=mine))
    return (
        F.cross_entropy(logits.flatten(0, 1), labels[:, mine].flatten(), reduction="sum")
        / counts.numel()
    )

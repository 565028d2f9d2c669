"""The loss on text that is not trained on."""

from collections.abc import Iterable

import torch

from minidist.full import Parallel
from minidist.full.collectives import all_reduce
from minidist.full.model import Where
from minidist.full.trainer.batches import Batch


def loss_on(
    batches: Iterable[Batch], parallel: Parallel, device: torch.device, scale: float = 1.0
) -> float:
    """Return the loss per token of held-out text, without dropout. Collective.

    It is the same on every layout: a sum over all tokens, divided by their number. Sites measure
    each on its own rows. Nothing changes
    for training: no gradient is computed, and batches to train on stay where they are. `scale` is
    what the model's loss is multiplied by.
    """
    mesh = parallel.mesh
    total, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    for whole in batches:
        batch = whole.to(device)
        parts = batch.microbatches(parallel.recipe.microbatches)
        where = [
            Where(rows=part.first_row, positions=part.positions, documents=part.documents)
            for part in parts
        ]
        loss = parallel.evaluate([part.inputs for part in parts], parts, where)
        total += loss.double() * batch.tokens
        tokens += batch.tokens
    total /= scale * mesh.dcn.size
    if mesh.tp.rank > 0:
        total.zero_()  # it is the same along the tensor axis
    all_reduce(total, mesh.world)
    return float(total) / tokens

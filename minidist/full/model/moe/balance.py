"""Balance: each expert has a bias that is added to its scores for choosing, and for nothing else.

Left alone, a router soon sends most tokens to a few experts. After each step the bias rises by a
constant where an expert had fewer tokens than the mean, and falls where it had more: no gradient,
and no second aim for the model to follow. The other remedy is a loss (`losses.py`). (Wang et al.
2024.)
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from minidist.full.model.moe.capacity import Sum
from minidist.full.model.moe.routed import routed_in


class Load(NamedTuple):
    """How evenly a step has loaded the experts.

    Attributes
    ----------
    imbalance : float
        Tokens of the busiest expert over the mean, on average over the layers: 1 if all have as
        many.
    dropped : int
        Choices that found no room.
    entropy : float
        The mean entropy of a token's scores, in nats; at most ln E.
    """

    imbalance: float
    dropped: int
    entropy: float


def rebalance(
    model: nn.Module, total: Sum = lambda mine: mine, sizes: tuple[int, int] | None = None
) -> Load | None:
    """Move each bias by one change, and begin a new tally. Call it once a step, after the last
    backward.

    Parameters
    ----------
    total : Sum
        Sums a table of all layers, float64 [L, E + 3], over the ranks that share the step.
    sizes : (int, int), optional
        The layers and experts (L, E) of a whole model of which this is a part, maybe one without
        layers.

    Returns
    -------
    Load or None
        None if no router was trained in this step.
    """
    routed = routed_in(model)
    sizes = sizes_of(model) if sizes is None else sizes
    device = next(model.parameters()).device
    if sizes is None or device.type == "meta":
        return None
    layers, experts = sizes
    table = torch.zeros(layers, experts + 3, dtype=torch.float64, device=device)
    for layer in routed:
        table[layer.index] = layer.tally
        layer.tally = torch.zeros_like(layer.tally)
    table = total(table).cpu()
    for layer in routed:
        if layer.config.balance == "bias":
            counts_E = table[layer.index, :experts]
            layer.bias += (counts_E.mean() - counts_E).sign().long()
    return load_of(table, experts)


def sizes_of(model: nn.Module) -> tuple[int, int] | None:
    """Return the layers and experts of the model that routed layers belong to; None without any."""
    routed = routed_in(model)
    return (routed[0].config.layers, routed[0].config.experts) if routed else None


def load_of(table: Tensor, experts: int) -> Load | None:
    """Return the load that a table of all layers' tallies [L, E + 3] says."""
    trained = table[table[:, -2] > 0]  # not the layers whose router is frozen
    if not len(trained):
        return None
    counts_LE = trained[:, :experts]
    dropped, tokens, entropy = trained[:, experts:].sum(0).tolist()
    imbalance = (counts_LE.amax(1) / counts_LE.mean(1)).mean()
    return Load(float(imbalance), int(dropped), entropy / tokens)

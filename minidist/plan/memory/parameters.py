"""Which parameters a rank has, and which ranks have the same ones."""

from collections.abc import Sequence
from typing import TypeAlias

from minidist.plan.links import Group
from minidist.plan.run import Setup

Parts: TypeAlias = Sequence[tuple[float, Group]]
"""Parameters on a rank, each with the ranks that have the same ones."""


def table_parameters(run: Setup) -> float:
    """Return the parameters of the embedding, or of the head, on each rank along tp."""
    return run.model.vocabulary * run.model.hidden / run.tp


def ends_parameters(run: Setup) -> float:
    """Return the parameters of embedding and head on a rank whose stage has either."""
    on_one_rank = run.rank_of[-1] == 0 and not run.model.tied
    return table_parameters(run) * (2 if on_one_rank else 1)


def parts_of(run: Setup, layers: float, ends: float, leading: float = 0.0) -> Parts:
    """Return the parameters of so many layers and of the ends on this rank, each with the ranks
    that have the same ones. `leading` of the layers are dense ones.
    """
    (dense, same), *routed = run.parts
    alike = layers - leading
    of_leading = leading * run.leading.dense_layer if leading else 0.0
    parts = [(alike * dense + of_leading + ends, same)]
    for count, copies in routed:
        parts.append((alike * count, copies))
    return parts

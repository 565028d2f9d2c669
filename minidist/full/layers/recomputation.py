"""Recomputation of the layers that a rank has, as a strategy."""

from collections.abc import Iterator
from typing import Any

from minidist.full.layers.blocks import blocks_of
from minidist.full.layers.options import RECOMPUTES, is_policy
from minidist.full.mesh import Layout
from minidist.full.recipe import Recipe
from minidist.full.recompute.segments import recompute
from minidist.full.strategy import Facts, Parallel, Strategy


class Recomputation(Strategy):
    """Keeps fewer activations, and computes them again in backward."""

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """A policy has a known name, and segments need layers."""
        if recipe.recompute != "none" and facts.layers < 1:
            yield (
                f"recompute={recipe.recompute!r} is for a model with a list of `layers`: use 'none'"
            )
        if not is_policy(recipe.recompute):
            yield (
                f"there is no policy {recipe.recompute!r} of recomputation: choose one of "
                f"{RECOMPUTES}"
            )

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """A recipe names another policy than "none"."""
        return recipe.recompute != "none"

    def apply(self, parallel: Parallel, checked: Any) -> None:
        """Apply the policy to each stage. A stage may have fewer layers than a segment, or none."""
        kind, _, length = parallel.recipe.recompute.partition(" ")
        for stage in parallel.stages.values():
            if not (layers := len(blocks_of(stage))):
                continue
            policy = kind
            if kind == "every":
                policy = f"every {min(int(length), layers)}"
            recompute(stage, policy)

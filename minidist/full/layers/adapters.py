"""Adapters beside the layers of a serial model: LoRA and QLoRA, as a strategy."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from minidist.full.adapters import add_lora, add_qlora
from minidist.full.mesh import Layout
from minidist.full.recipe import Recipe
from minidist.full.replica import Alone
from minidist.full.strategy import Facts, Parallel, Strategy


class Adapters(Strategy):
    """Trains adapters in place of the model."""

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """An adapter has a rank. Matrices in 4 bits cannot be cut, multiplied, or experts."""
        if recipe.lora < 0 or (recipe.qlora and not recipe.lora):
            yield (
                f"lora={recipe.lora} is not the rank of an adapter, with qlora={recipe.qlora}: use "
                "at least 1, such as 8"
            )
        if recipe.qlora and layout.tp > 1:
            yield (
                f"qlora=True shares scales out within whole matrices, which tp={layout.tp} cuts: "
                "use lora alone"
            )
        if recipe.qlora and recipe.fp8:
            yield (
                "fp8=True multiplies matrices of 16 bits or more, which qlora=True replaces: "
                "leave one of them out"
            )
        if recipe.qlora and facts.experts:
            yield (
                "qlora=True stores the matrices of linear layers, and this model's experts are not "
                "linear layers: leave it out"
            )

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """A recipe names their rank."""
        return recipe.lora > 0

    def apply(self, parallel: Parallel, checked: Any) -> None:
        """Put adapters beside the layers, and freeze all else."""
        adapt(parallel.model, parallel.recipe, parallel.generator)
        parallel.replica = Alone(parallel.model)  # of what is trained now


def adapt(model: nn.Module, recipe: Recipe, generator: torch.Generator | None = None) -> None:
    """Put adapters beside the layers of a serial model, if the recipe has some."""
    if recipe.lora:
        add = add_qlora if recipe.qlora else add_lora
        add(model, recipe.lora, generator=generator)

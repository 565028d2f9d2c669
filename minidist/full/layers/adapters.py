"""Adapters beside the layers of a serial model: LoRA, as a strategy."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from minidist.full.adapters import add_lora
from minidist.full.mesh import Layout
from minidist.full.recipe import Recipe
from minidist.full.replica import Alone
from minidist.full.strategy import Facts, Parallel, Strategy


class Adapters(Strategy):
    """Trains adapters in place of the model."""

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """An adapter has a rank."""
        if recipe.lora < 0:
            yield f"lora={recipe.lora} is not the rank of an adapter: use at least 1, such as 8"

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """A recipe names their rank."""
        return recipe.lora > 0

    def apply(self, parallel: Parallel, checked: Any) -> None:
        """Put adapters beside the layers, and freeze all else."""
        self.extend(parallel.model, parallel.recipe, parallel.generator)
        parallel.replica = Alone(parallel.model)  # of what is trained now

    def extend(
        self, model: nn.Module, recipe: Recipe, generator: torch.Generator | None = None
    ) -> None:
        """Put adapters beside the layers of a serial model."""
        add_lora(model, recipe.lora, generator=generator)

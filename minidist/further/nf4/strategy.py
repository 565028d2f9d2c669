"""QLoRA as a strategy, in the place of LoRA."""

from collections.abc import Iterator

import torch
from torch import nn

from minidist.full.layers.adapters import Adapters
from minidist.full.mesh import Layout
from minidist.full.recipe import Recipe
from minidist.full.strategy import Facts
from minidist.further.nf4.options import in_four_bits
from minidist.further.nf4.qlora import add_qlora


class QuantizedAdapters(Adapters):
    """Trains adapters in place of the model, whose matrices can be stored in four bits."""

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """Matrices in 4 bits have adapters, and cannot be cut, multiplied in 8 bits, or experts."""
        yield from super().faults(recipe, layout, facts)
        if not in_four_bits(recipe):
            return
        if not recipe.lora:
            yield "lora=0 is not the rank of an adapter, with qlora=True: use at least 1, such as 8"
        if layout.tp > 1:
            yield (
                f"qlora=True shares scales out within whole matrices, which tp={layout.tp} cuts: "
                "use lora alone"
            )
        if recipe.fp8:
            yield (
                "fp8=True multiplies matrices of 16 bits or more, which qlora=True replaces: "
                "leave one of them out"
            )
        if facts.experts:
            yield (
                "qlora=True stores the matrices of linear layers, and this model's experts are not "
                "linear layers: leave it out"
            )
        if recipe.autocast:
            yield (
                f"autocast={recipe.autocast!r} chooses the dtype of products, which 4 bits (qlora) "
                "choose for themselves: leave one of them out"
            )

    def extend(
        self, model: nn.Module, recipe: Recipe, generator: torch.Generator | None = None
    ) -> None:
        """Put adapters beside the layers of a serial model."""
        if in_four_bits(recipe):
            add_qlora(model, recipe.lora, generator=generator)
        else:
            super().extend(model, recipe, generator)

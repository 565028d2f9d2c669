"""Products in 8 bits, as a strategy."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from minidist.memory.precision.fp8 import Float8Multiply, to_fp8, update_scales
from minidist.mesh import Layout
from minidist.parallel.recipe import Recipe
from minidist.parallel.strategy import Facts, Parallel, Strategy


class Float8(Strategy):
    """Multiplies in 8 bits in the linear layers of the blocks.

    A checkpoint keeps the scales.
    """

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """Experts are multiplied in their own dtype."""
        if recipe.fp8 and facts.experts:
            yield (
                "fp8=True quantises linear layers, and this model's experts are not linear layers: "
                "leave it out"
            )

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """A recipe says so."""
        return recipe.fp8

    def apply(self, parallel: Parallel, checked: Any) -> None:
        """Replace the products of the layers that this rank has."""
        to_fp8(parallel.model)

    def after_step(self, parallel: Parallel) -> None:
        """Let scales follow what all ranks saw: parts of one tensor lie on ranks of two axes."""
        update_scales(parallel.model, parallel.mesh.data, parallel.mesh.tp)

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the histories of the scales of each layer."""
        return {
            f"scales/{name}": module.histories
            for name, module in model.named_modules()
            if isinstance(module, Float8Multiply)
        }

"""Products in 8 bits, as a strategy."""

from typing import Any

from torch import Tensor, nn

from minidist.full.layers.blocks import blocks_of
from minidist.full.mesh import Layout
from minidist.full.precision.fp8 import Float8Multiply, to_fp8, update_scales
from minidist.full.precision.fp8_experts import experts_to_fp8
from minidist.full.recipe import Recipe
from minidist.full.strategy import Facts, Parallel, Strategy


class Float8(Strategy):
    """Multiplies in 8 bits in the linear layers of the blocks, and in their experts.

    A checkpoint keeps the scales.
    """

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """A recipe says so."""
        return recipe.fp8

    def apply(self, parallel: Parallel, checked: Any) -> None:
        """Replace the products of the layers that this rank has; it may have the embedding alone."""
        if blocks_of(parallel.model):
            to_fp8(parallel.model)
            experts_to_fp8(parallel.model)

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

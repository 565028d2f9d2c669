"""Products in 8 bits, as a strategy."""

from collections.abc import Iterator
from typing import Any

from minidist.memory.precision.fp8 import to_fp8, update_scales
from minidist.mesh import Layout
from minidist.parallel.recipe import Recipe
from minidist.parallel.strategy import Facts, Parallel, Strategy


class Float8(Strategy):
    """Multiplies in 8 bits in the linear layers of the blocks. Its scales are state of the model
    (`state_beside`).
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

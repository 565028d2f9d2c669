"""Clipping by value, as a strategy: each rank clips its own gradients before they are reduced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clipped_by_value.options import ClippingOptions
from minidist.full.mesh import Layout
from minidist.full.recipe import Recipe
from minidist.full.strategy import Facts, Parallel, Strategy


@dataclass(frozen=True)
class ClippingRecipe(ClippingOptions, Recipe):
    """A recipe with one more option: in the package this is one more base of `Recipe`."""


class Clipping:
    """The limit, and where it is kept."""

    def __init__(self, largest: float) -> None:
        self.largest, self.hooks = largest, []

    def clip(self, gradient: Tensor) -> Tensor:
        """Return a gradient without larger elements."""
        return gradient.clamp(-self.largest, self.largest)


class ClippingByValue(Strategy):
    """Clips the gradient that autograd has computed for each parameter."""

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """A stage that puts weight gradients off computes them where no hook sees them."""
        assert isinstance(recipe, ClippingRecipe)
        if recipe.largest and layout.pp > 1:
            yield f"largest={recipe.largest} sees no weight gradients that are put off: use pp=1"

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """A recipe names the largest element."""
        assert isinstance(recipe, ClippingRecipe)
        return recipe.largest > 0

    def check(self, model: Any, mesh: Any, recipe: Recipe) -> Clipping:
        """Return the limit."""
        assert isinstance(recipe, ClippingRecipe)
        return Clipping(recipe.largest)

    def apply(self, parallel: Parallel, checked: Clipping) -> None:
        """Hang a hook on each parameter, which runs before those of what reduces gradients."""
        checked.hooks = [
            parameter.register_hook(checked.clip) for parameter in parallel.model.parameters()
        ]

    def undo(self, parallel: Parallel) -> None:
        """Take the hooks away."""
        for hook in parallel.applied[self].hooks:
            hook.remove()

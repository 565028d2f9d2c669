"""Sites that can send little of an outer step, as a strategy in the place of sites."""

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from minidist.full.mesh import Layout
from minidist.full.recipe import Recipe
from minidist.full.slow_wires.outer import OuterStep
from minidist.full.slow_wires.strategy import Sites
from minidist.full.strategy import Facts
from minidist.further.sparse_step.options import SparseSiteOptions
from minidist.further.sparse_step.sparse_step import SparseStep


def share_of(recipe: Recipe) -> float:
    """Return which share of an outer step a recipe sends; 0: all."""
    return recipe.outer_topk if isinstance(recipe, SparseSiteOptions) else 0.0


class SparseSites(Sites):
    """Lets each site train alone, and meet the others in few bytes."""

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """What is not sent is kept, and ranks that have copies send the same of them."""
        yield from super().faults(recipe, layout, facts)
        topk = share_of(recipe)
        if topk and recipe.outer_momentum:
            yield (
                f"outer_topk={topk} keeps what is not sent, which takes the place of "
                f"outer_momentum={recipe.outer_momentum}: use outer_momentum=0"
            )
        axes = {"tp": layout.tp, "ep": layout.ep, "pp": layout.pp}
        cut = [f"{axis}={ranks}" for axis, ranks in axes.items() if ranks > 1]
        if topk and recipe.zero and cut:
            yield (
                f"outer_topk={topk} sends the largest of the slices that zero="
                f"{recipe.zero} leaves a rank, and with {' and '.join(cut)} ranks that have copies "
                f"of one parameter may have others: use zero=0, or outer_topk=0"
            )

    def travels(self, recipe: Recipe) -> Callable[[Tensor], OuterStep]:
        """Return what makes of a flat outer step what is sent."""
        share = share_of(recipe)
        return partial(SparseStep, share=share) if share else super().travels(recipe)

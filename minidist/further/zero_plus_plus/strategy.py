"""ZeRO++ on the data axis, in the place of FSDP."""

from collections.abc import Callable, Iterator
from functools import partial

from minidist.full.data_axis import DataAxis
from minidist.full.mesh import Layout, Mesh
from minidist.full.recipe import Recipe
from minidist.full.replica import Replica
from minidist.full.strategy import Facts
from minidist.further.zero_plus_plus.options import ZeROPlusPlusOptions
from minidist.further.zero_plus_plus.zero_plus_plus import ZeROPlusPlus

NOTHING = ZeROPlusPlusOptions()


def asked(recipe: Recipe) -> ZeROPlusPlusOptions:
    """Return what a recipe asks for; nothing, if it does not have these options."""
    return recipe if isinstance(recipe, ZeROPlusPlusOptions) else NOTHING


class QuantizedDataAxis(DataAxis):
    """The data axis, on which ZeRO 3 can send fewer bytes between nodes."""

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """ZeRO++ takes all ranks, nodes of one size, and parameters with as many copies."""
        yield from super().faults(recipe, layout, facts)
        options, ranks = asked(recipe), layout.data
        if options.zeropp and (recipe.zero != 3 or recipe.hsdp):
            what = f"ZeRO {recipe.zero}" if recipe.zero != 3 else f"groups of {recipe.hsdp} ranks"
            yield (
                f"zeropp=True is ZeRO 3 over all ranks of the data axis, not {what}: use zero=3 "
                "alone"
            )
        if options.zeropp and layout.ep > 1:
            yield (
                f"ep={layout.ep}: experts have fewer copies than all else, which ZeRO++ does not "
                "know: leave it out"
            )
        if (nodes := options.node_ranks) is not None and (
            not options.zeropp or nodes < 1 or ranks % nodes
        ):
            yield (
                f"node_ranks={nodes} is for zeropp=True and a divisor of the {ranks} ranks of the "
                "data axis: leave it out"
            )

    def words(self, recipe: Recipe, mesh: Mesh) -> str:
        """Name the size of a node, or what else the data axis does."""
        if not asked(recipe).zeropp:
            return super().words(recipe, mesh)
        return f"dp={mesh.dp.size} (ZeRO++ with nodes of {len(mesh.data.node)})"

    def builder(self, recipe: Recipe) -> Callable[..., Replica]:
        """Return what wraps a model that is equal on all ranks."""
        options = asked(recipe)
        if not options.zeropp:
            return super().builder(recipe)
        return partial(ZeROPlusPlus, node_ranks=options.node_ranks, allocate=recipe.allocate)

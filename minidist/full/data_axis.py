"""Ranks that begin equal, and the strategy over the data axis: data parallelism (`data/`) or a stage
of ZeRO (`sharded/`).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from minidist.full.ddp.after_backward import NaiveDataParallel, ParameterServer
from minidist.full.ddp.buckets import MIB
from minidist.full.ddp.compress.compressed import CompressedDDP, Compressor, compressor_of
from minidist.full.ddp.data_parallel import DDP
from minidist.full.ddp.options import STRATEGIES, DataParallelOptions
from minidist.full.ddp.replicas import make_equal
from minidist.full.fsdp.fsdp import FSDP
from minidist.full.mesh import Layout, Mesh
from minidist.full.pipeline.stage import tied_names
from minidist.full.recipe import Recipe, RecipeError
from minidist.full.replica import Replica
from minidist.full.strategy import Facts, Parallel, Strategy
from minidist.full.zero.zero import ZeRO1, ZeRO2


class EqualValues(Strategy):
    """Makes the model equal on all ranks of the mesh, once: what comes later does not do it again."""

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """Several ranks may have drawn other values."""
        return layout.size > 1

    def apply(self, parallel: Parallel, checked: Any) -> None:
        """Broadcast the model, adapters included: one broadcast for each tensor."""
        make_equal(parallel.model, parallel.mesh.world)


class DataAxis(Strategy):
    """Reduces the gradients of what is left on this rank, or shards what there is.

    Parameters
    ----------
    compressor : callable
        `compressor(recipe.compress)` returns what compresses gradients.
    """

    def __init__(self, compressor: Callable[[str], Compressor] = compressor_of) -> None:
        self.compressor = compressor

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """Options go with the strategy and the stage, and divide the ranks of the data axis."""
        ranks = layout.data
        if recipe.strategy not in STRATEGIES:
            yield f"there is no strategy {recipe.strategy!r}: choose one of {', '.join(STRATEGIES)}"
        if recipe.zero and recipe.strategy != "ddp":
            yield (
                f"ZeRO {recipe.zero} shards what ddp reduces, not strategy {recipe.strategy!r}: "
                "use ddp"
            )
        if recipe.compress and (recipe.zero or recipe.strategy != "ddp"):
            how = f"ZeRO {recipe.zero}" if recipe.zero else f"the strategy {recipe.strategy!r}"
            yield f"compress={recipe.compress!r} is for ddp, not for {how}: leave it out"
        if recipe.hsdp and recipe.zero != 3:
            yield f"hsdp={recipe.hsdp} is for ZeRO 3, not for ZeRO {recipe.zero}: leave it out"
        if recipe.hsdp and (recipe.hsdp < 0 or ranks % recipe.hsdp):
            yield (
                f"hsdp={recipe.hsdp} does not divide the {ranks} ranks of the data axis: choose a "
                f"divisor of {ranks}"
            )
        if recipe.bucket_mib != DataParallelOptions.bucket_mib and (
            recipe.zero == 3 or recipe.strategy != "ddp"
        ):
            how = "ZeRO 3" if recipe.zero == 3 else f"the strategy {recipe.strategy!r}"
            yield (
                f"bucket_mib={recipe.bucket_mib} is for ddp and ZeRO 1 and 2, not for {how}: "
                "leave it out"
            )
        if recipe.allocate is not None and recipe.zero != 3:
            yield (
                f"allocate={recipe.allocate} is for the shards of ZeRO 3, not for ZeRO "
                f"{recipe.zero}: leave it out"
            )

    def check(self, model: nn.Module, mesh: Mesh, recipe: Recipe) -> None:
        """Compressed, the copies of a tied parameter would keep back what belongs to neither."""
        if recipe.keeps_back and mesh.pp.size > 1 and tied_names(model):
            raise RecipeError(
                f"compress={recipe.compress!r} keeps back gradients, and those of the tied head are "
                "on two stages of the pipeline: leave --tied, --pp or --compress out"
            )

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """The data axes have several ranks."""
        return layout.data > 1

    def apply(self, parallel: Parallel, checked: Any) -> None:
        """Wrap the model. Gradients are summed: the loss is divided by the tokens of all ranks."""
        build = self.builder(parallel.recipe)
        parallel.replica = build(parallel.model, parallel.mesh.data, "sum", equal=True)

    def builder(self, recipe: Recipe) -> Callable[..., Replica]:
        """Return what wraps a model that is equal on all ranks."""
        if recipe.strategy != "ddp":
            return NaiveDataParallel if recipe.strategy == "naive" else ParameterServer
        if recipe.zero == 3:
            return partial(FSDP, shard_ranks=recipe.hsdp or None, allocate=recipe.allocate)
        size = int(recipe.bucket_mib * MIB)
        first = min(MIB, size)  # a small first bucket: see `DDP`
        kind: Any = (DDP, ZeRO1, ZeRO2)[recipe.zero]
        if recipe.compress:
            kind = partial(CompressedDDP, compress=self.compressor(recipe.compress))
        return partial(kind, bucket_bytes=size, first_bucket_bytes=first)

    def words(self, recipe: Recipe, mesh: Mesh) -> str:
        """Name the stage of ZeRO, or what reduces whole gradients."""
        how = f"ZeRO-{recipe.zero}" if recipe.zero else recipe.strategy
        if recipe.compress:
            how += f", {recipe.compress}"
        return f"dp={mesh.dp.size} ({how})"

    def undo(self, parallel: Parallel) -> None:
        """Gather what ZeRO 3 has cut along the data axis."""
        parallel.replica.unwrap()

"""From what a run is told to how its model is spread: the recipe, the loss, and what goes from stage to stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from minidist.memory.offload import mapped
from minidist.mesh import Layout, Mesh
from minidist.model import GPT, cross_entropy_sum
from minidist.parallel import Recipe, vocabulary_parallel_cross_entropy_sum
from minidist.parallel.pipeline import Plan, ScheduleError, read_plan
from minidist.parallel.tensor.plan import check_plan
from minidist.trainer.config import Config, ConfigError, ParallelOptions
from minidist.trainer.files import FileError, read_text

MIB = 1 << 20


def recipe_of(config: Config, layout: Layout) -> Recipe:
    """Return the recipe that a configuration asks for on a layout.

    Raises
    ------
    ConfigError
        If there is none: naming the options and the fix.
    """
    parallel = config.parallel
    own = _read_plan(config) if parallel.plan else None
    count = own.microbatches if own else parallel.microbatches or 2 * layout.pp
    if layout.pp > 1:
        _check_rows(config, layout, count)
    recipe = Recipe(
        strategy=parallel.strategy,  # type: ignore[arg-type]  # one of the three, or the configuration would not be
        zero=parallel.zero,
        shard_ranks=parallel.hsdp or None,
        bucket_bytes=int(parallel.bucket_mib * MIB) if parallel.zero < 3 else Recipe.bucket_bytes,
        sequence=parallel.sp,
        schedule=own or parallel.schedule,
        chunks=(parallel.chunks or 2) if parallel.schedule == "interleaved" else 1,
        microbatches=count if layout.pp > 1 else parallel.accumulate,
        recompute=config.memory.recompute,
        allocate=_shard_memory(config),
    )
    try:
        recipe.check(layout, config.model.layers)
    except ValueError as error:
        raise ConfigError(f"--plan {parallel.plan}: {error}" if own else str(error)) from None
    return recipe


def _check_rows(config: Config, layout: Layout, microbatches: int) -> None:
    """Raise ConfigError if some microbatch of a whole batch is empty; before planning, which takes a time for each."""
    parallel, rows = config.parallel, config.data.batch // layout.dp
    if microbatches > rows:
        fewer = f"--microbatches {rows} or fewer, or " if rows and not parallel.plan else ""
        raise ConfigError(
            f"{microbatches} microbatches cut the {rows} sequences that each data-parallel rank has (--batch "
            f"{config.data.batch}, dp={layout.dp}) into more parts than there are: use {fewer}--batch "
            f"{microbatches * layout.dp} or more"
        )


def _read_plan(config: Config) -> Plan:
    """Return the user's plan, in which nothing but the words has been looked at."""
    parallel, path = config.parallel, Path(config.parallel.plan)
    if parallel.schedule != ParallelOptions().schedule:
        raise ConfigError(f"--plan {path} takes the place of --schedule {parallel.schedule}: leave one of them out")
    try:
        plan = read_plan(read_text(path), path.name)
    except FileError as error:
        raise ConfigError(f"--plan {path} {error}") from None
    except ScheduleError as error:
        raise ConfigError(f"--plan {path}: {error}") from None
    if plan.communicates or plan.reduces:
        added = "sends and receives" if plan.communicates else "reductions"
        raise ConfigError(f"--plan {path} names {added}, which are added to a plan before it runs: leave them out")
    return plan


def check_cuts(model: GPT, mesh: Mesh, config: Config) -> None:
    """Raise ConfigError, having sent nothing, if matrices or sequences cannot be cut for the tensor axis."""
    tp = mesh.layout.tp
    if tp == 1:
        return
    try:
        check_plan(model, mesh.tp, None, config.parallel.sp)
    except ValueError as error:
        raise ConfigError(f"--tp {tp}: {error}") from None
    if config.parallel.sp and config.data.sequence % tp:
        raise ConfigError(
            f"--sp shares the {config.data.sequence} tokens of a sequence out evenly among {tp} ranks: use a "
            f"--sequence that {tp} divides, such as {config.data.sequence // tp * tp or tp}"
        )


def loss_of(model: GPT, mesh: Mesh) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `loss(logits, targets)`, a sum over tokens, for logits as the head returns them on this mesh."""
    if mesh.layout.tp == 1:
        return cross_entropy_sum
    vocabulary = model.config.vocabulary
    return lambda logits, targets: vocabulary_parallel_cross_entropy_sum(logits, targets, mesh.tp, vocabulary)


def carried_of(model: GPT, mesh: Mesh, recipe: Recipe) -> Callable[[Tensor], Tensor]:
    """Return what tells the shape of the activations between stages: [b, T, D], or T/P under sequence parallelism."""
    hidden, dtype = model.config.hidden, model.embedding.weight.dtype
    share = mesh.layout.tp if recipe.sequence else 1
    return lambda inputs: torch.empty(len(inputs), inputs.shape[1] // share, hidden, dtype=dtype, device="meta")


def check_room(model: nn.Module, mesh: Mesh, config: Config) -> None:
    """Raise ConfigError if this rank's shards of parameters are to lie in files, and the disk has no room for them."""
    if config.parallel.zero == 3 and isinstance(config.offload_to, Path):
        layout = mesh.layout
        ranks = (config.parallel.hsdp or layout.dp) * layout.pp * layout.tp
        bytes = sum(parameter.nbytes for parameter in model.parameters()) // ranks
        try:
            mapped((bytes,), torch.uint8, config.offload_to, "this rank's part of the parameters")
        except OSError as error:
            raise ConfigError(f"--offload disk: {error.strerror}") from None


def _shard_memory(config: Config) -> Callable[[int, torch.dtype], Tensor] | None:
    """Return what allocates shards of parameters where the optimizer's state lies, if that is not on the device."""
    if config.parallel.zero != 3:
        return None
    if isinstance(config.offload_to, Path):
        folder = config.offload_to
        return lambda count, dtype: mapped((count,), dtype, folder, "parameters")
    if config.offload_to == "cpu" and torch.cuda.is_available():
        return lambda count, dtype: torch.zeros(count, dtype=dtype, pin_memory=True)
    return None

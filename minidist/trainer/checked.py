"""Does a run fit its ranks and its model? This is checked once: who takes the `CheckedRun` does not
check again.

    config, ranks ──layout_of──▶ layout ──Mesh──▶ mesh ─┐
    config, vocabulary of the tokenizer ────────────────┴──check_run──▶ CheckedRun ──▶ Trainer

`config.py` has already checked the options against each other. Checking sends nothing, so ranks can
still agree on whether to start (`agreement.py`). The command `train` checks what depends on one
machine, its memory and its files (`cli/train_checks.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from minidist.comm import Communicator
from minidist.memory.precision.mixed import check_dtype
from minidist.mesh import AXES, Layout, Mesh
from minidist.model import GPT, GPTConfig
from minidist.parallel import Recipe
from minidist.parallel.data.buckets import MIB
from minidist.parallel.parallelize import Fit, check_fit
from minidist.parallel.pipeline import Plan, ScheduleError, read_plan
from minidist.parallel.recipe import RecipeError
from minidist.trainer.checkpoint.resume import sizes_of
from minidist.trainer.config import Config, ConfigError, in_flags
from minidist.trainer.files import FileError, read_text, retold
from minidist.trainer.spread import shard_memory, tokens_multiple


class CheckedRun(NamedTuple):
    """A run that fits its ranks; `check_run` makes it.

    Attributes
    ----------
    config : Config
    mesh : Mesh
        The ranks, and where they lie.
    sizes : GPTConfig
        Of the whole model.
    fit : Fit
        How the model is spread over the mesh.
    """

    config: Config
    mesh: Mesh
    sizes: GPTConfig
    fit: Fit


def layout_of(config: Config, ranks: int) -> Layout:
    """Return the layout that was asked for. Without `--dp`, its data axis takes all ranks that the
    others leave.

    Raises
    ------
    ConfigError
        If it does not have as many ranks as were started, or `--hsdp` does not divide its data
        axis.
    """
    asked = config.parallel
    with retold(ConfigError, ValueError, words=in_flags):
        others = asked.pp * asked.cp * asked.tp
        sizes = {
            "dp": asked.dp or max(1, ranks // others),
            "pp": asked.pp,
            "cp": asked.cp,
            "tp": asked.tp,
        }
        named = asked.order.split(",")
        unnamed = tuple(axis for axis in AXES if axis not in named and sizes[axis] == 1)
        layout = Layout(**sizes, ep=asked.ep, order=(*named, *unnamed))
        layout.check(ranks)
    if (data := layout.dp * layout.cp) % (asked.hsdp or 1):
        raise ConfigError(
            f"--hsdp {asked.hsdp} must divide the {data} ranks of the data axis into groups of "
            "one size"
        )
    return layout


def check_order(layout: Layout, nodes: Sequence[object]) -> None:
    """Refuse an order that spreads tensor parallelism over nodes (`nodes[rank]` names a rank's)
    which could hold it.

    Raises
    ------
    ConfigError
        If it does.
    """
    known = replace(layout, order=AXES)
    if layout.links_between(nodes)["tp"] != "inside" == known.links_between(nodes)["tp"]:
        raise ConfigError(
            f"--order {','.join(layout.order)} spreads the {layout.tp} ranks of tp, which talk "
            "several times a layer, over several nodes: name tp last"
        )


def check_run(config: Config, mesh: Mesh, vocabulary: int) -> CheckedRun:
    """Check that the model can be spread over the ranks as asked. Sends nothing, and draws no
    weights.

    Raises
    ------
    ConfigError
        If it cannot, naming the options and the fix; or if `--init` or `--plan` cannot be read.
    """
    with retold(ConfigError, ValueError, before=f"--precision {config.precision}: "):
        check_dtype(config.dtype, device_of(mesh.world))
    sizes, recipe = sizes_of(config, vocabulary), _recipe_of(config, mesh.layout)
    try:
        fit = check_fit(GPT(sizes, device="meta"), mesh, recipe)
    except RecipeError as error:
        plan = f"--plan {config.parallel.plan}: " if config.parallel.plan else ""
        raise ConfigError(f"{plan}{in_flags(str(error))}") from None
    except ValueError as error:
        raise ConfigError(f"--tp {mesh.layout.tp}: {in_flags(str(error))}") from None
    if (time := config.data.sequence) % (multiple := tokens_multiple(recipe, mesh.layout)):
        flags = " and ".join(["--cp"] * (mesh.cp.size > 1) + ["--sp"] * recipe.sequence)
        fix = (
            f"use a --sequence that {multiple} divides, such as "
            f"{time // multiple * multiple or multiple}"
        )
        raise ConfigError(
            f"{flags}: the {time} tokens of a sequence are not shared out evenly: {fix}"
        )
    if sizes.experts and config.data.by_length and multiple > 1:
        counted = (
            f"--by-length pads rows to a multiple of {multiple} tokens on this layout, which "
            "experts would count"
        )
        raise ConfigError(f"{counted}: leave --by-length out, or --cp and --sp")
    return CheckedRun(config, mesh, sizes, fit)


def device_of(comm: Communicator) -> torch.device:
    """Return where this rank computes: on its GPU if its wire is NCCL, else on the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if comm.wire.carries_cuda
        else torch.device("cpu")
    )


# ---------------------------------------------------------------- the recipe


def _recipe_of(config: Config, layout: Layout) -> Recipe:
    """Return the recipe that a configuration asks for, not yet checked."""
    parallel = config.parallel
    own = _read_plan(config) if parallel.plan else None
    count = own.microbatches if own else parallel.microbatches or 2 * layout.pp
    # planning, which comes later, visits each
    if layout.pp > 1 and count > (rows := config.data.batch // layout.dp):
        asked = (
            f"{rows} sequences that each data-parallel rank has (--batch {config.data.batch}, "
            f"dp={layout.dp})"
        )
        fewer = f"--microbatches {rows} or fewer, or " if rows and not own else ""
        fix = f"use {fewer}--batch {count * layout.dp} or more"
        raise ConfigError(
            f"{count} microbatches cut the {asked} into more parts than there are: {fix}"
        )
    same = ("strategy", "zero", "compile", "zeropp", "cp_comm", "cp_order", "ep_comm", "ep_fp8")
    return Recipe(
        **{name: getattr(parallel, name) for name in same},
        shard_ranks=parallel.hsdp or None,
        bucket_bytes=int(parallel.bucket_mib * MIB) if parallel.zero < 3 else Recipe.bucket_bytes,
        sequence=parallel.sp,
        schedule=own or parallel.schedule,
        chunks=(parallel.chunks or 2) if parallel.schedule == "interleaved" else 1,
        microbatches=count if layout.pp > 1 else parallel.accumulate,
        recompute=config.memory.recompute,
        allocate=shard_memory(config),
        lora=config.adapter_rank,
        qlora=config.run.qlora,
        fp8=config.precision == "fp8",
    )


def _read_plan(config: Config) -> Plan:
    """Return the user's plan. Only its words are checked here: whether it can run, `Recipe.check`
    finds out.
    """
    path = Path(config.parallel.plan)
    with retold(ConfigError, FileError, before=f"--plan {path} "):
        text = read_text(path)
    with retold(ConfigError, ScheduleError, before=f"--plan {path}: "):
        plan = read_plan(text, path.name)
    if plan.communicates or plan.reduces:
        added = "sends and receives" if plan.communicates else "reductions"
        raise ConfigError(
            f"--plan {path} names {added}, which are added to a plan before it runs: leave them out"
        )
    return plan

"""Does a run fit its ranks and its model? This is checked once: who takes the `CheckedRun` does not
check again.

    config, ranks ──layout_of──▶ layout ──Mesh──▶ mesh ─┐
    config, vocabulary of the tokenizer ────────────────┴──check_run──▶ CheckedRun ──▶ Trainer

`config.py` has already checked the options against each other. Checking sends nothing, so ranks can
still agree on whether to start (`all_or_none`). The command `train` checks what depends on one
machine, its memory and its files (`cli/train_checks.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import torch

from minidist.full import Recipe
from minidist.full.apply import Fit, check_fit
from minidist.full.comm import Communicator
from minidist.full.data.files import FileError, read_text, retold
from minidist.full.layers.autocast import DTYPES
from minidist.full.mesh import AXES, SITES, SIZES, Layout, Mesh
from minidist.full.model import GPT, GPTConfig
from minidist.full.pipeline import Plan, ScheduleError, read_plan
from minidist.full.precision.mixed import check_dtype
from minidist.full.recipe import RecipeError
from minidist.full.trainer.config import Config, ConfigError
from minidist.full.trainer.optimizer import shard_memory
from minidist.full.trainer.resume import sizes_of


class CheckedRun(NamedTuple):
    """A run that fits its ranks; `check_run` makes it.

    Attributes
    ----------
    config : Config
    mesh : Mesh
        The ranks, and where they lie.
    sizes : GPTConfig
        The sizes of the whole model.
    fit : Fit
        How the model is spread over the mesh.
    """

    config: Config
    mesh: Mesh
    sizes: GPTConfig
    fit: Fit

    def from_nothing(self) -> "CheckedRun":
        """Return the run that begins anew, whatever is on the disk."""
        return self._replace(
            config=replace(self.config, run=replace(self.config.run, resume=False))
        )


def layout_of(config: Config, ranks: int) -> Layout:
    """Return the layout that was asked for.

    Without `--dp`, its data axis takes all ranks that the others leave.

    Raises
    ------
    ConfigError
        If it does not have as many ranks as were started, or `--hsdp` does not divide its data
        axis.
    """
    asked = config.parallel
    with retold(ConfigError, ValueError, words=config.in_flags):
        sizes = {axis: getattr(asked, axis) for axis in SIZES}
        if not asked.dp:
            others = math.prod(sizes[axis] for axis in (*AXES, SITES) if axis != "dp")
            sizes["dp"] = max(1, ranks // others)
        named = asked.order.split(",")
        unnamed = tuple(axis for axis in AXES if axis not in named and sizes[axis] == 1)
        layout = Layout(**sizes, order=(*named, *unnamed))
        layout.check(ranks)
    if layout.data % (asked.hsdp or 1):
        raise ConfigError(
            f"--hsdp {asked.hsdp} must divide the {layout.data} ranks of the data axis into groups of "
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
    """Check that the model can be spread over the ranks as asked.

    Sends nothing, and draws no weights.

    Raises
    ------
    ConfigError
        If it cannot, naming the options and the fix; or if `--init` or `--plan` cannot be read.
    """
    with retold(ConfigError, ValueError, before=f"--precision {config.precision}: "):
        computing = DTYPES[config.autocast] if config.autocast else config.dtype
        check_dtype(computing, device_of(mesh.world))
    sizes, recipe = sizes_of(config, vocabulary), recipe_of(config, mesh.layout)
    try:
        fit = check_fit(GPT(sizes, device="meta"), mesh, recipe, config.strategies)
    except RecipeError as error:
        plan = f"--plan {config.parallel.plan}: " if config.parallel.plan else ""
        raise ConfigError(f"{plan}{config.in_flags(str(error))}") from None
    except ValueError as error:
        raise ConfigError(f"--tp {mesh.layout.tp}: {config.in_flags(str(error))}") from None
    shares = fit.shares(mesh.layout)
    multiple = math.prod(shares.values())
    flags = " and ".join(f"--{option}" for option in shares)
    if (time := config.data.sequence) % multiple:
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
        raise ConfigError(f"{counted}: leave --by-length out, or {flags}")
    return CheckedRun(config, mesh, sizes, fit)


def device_of(comm: Communicator) -> torch.device:
    """Return where this rank computes: on its GPU if its wire is NCCL, else on the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if comm.wire.carries_cuda
        else torch.device("cpu")
    )


# ---------------------------------------------------------------- the recipe


def recipe_of(config: Config, layout: Layout) -> Recipe:
    """Return the recipe that a configuration asks for, not yet checked."""
    said = {
        option.name: getattr(section, option.name)
        for section in (config.parallel, config.memory, config.run)
        for option in fields(section)
    }
    said |= {
        "lora": config.adapter_rank,
        "fp8": config.precision == "fp8",
        "autocast": config.autocast,
        "allocate": shard_memory(config),
    }
    if config.parallel.plan:
        said["schedule"] = _read_plan(config)
    if layout.pp == 1:
        said["microbatches"] = config.parallel.accumulate
    recipe = config.recipe(**{option.name: said[option.name] for option in fields(config.recipe)})
    _check_rows(config, layout, recipe)
    return recipe


def _check_rows(config: Config, layout: Layout, recipe: Recipe) -> None:
    """Refuse more microbatches than a rank has sequences.

    This comes before planning, which visits each.
    """
    count, rows = recipe.settled(layout).microbatches, config.data.batch // (layout.dcn * layout.dp)
    if layout.pp == 1 or count <= rows:
        return
    asked = (
        f"{rows} sequences that each data-parallel rank has (--batch {config.data.batch}, "
        f"dp={layout.dp})"
    )
    fewer = f"--microbatches {rows} or fewer, or " if rows and not config.parallel.plan else ""
    fix = f"use {fewer}--batch {count * layout.dp} or more"
    raise ConfigError(f"{count} microbatches cut the {asked} into more parts than there are: {fix}")


def _read_plan(config: Config) -> Plan:
    """Return the user's plan.

    Only its words are checked here: whether it can run, `check_fit` finds out.
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

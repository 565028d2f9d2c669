"""What a run starts from: a model, batches of text, and the place at which an earlier run ended.

    CheckedRun, samples ──start_of──▶ Start ──▶ Trainer

Nothing is sent, so ranks can still agree on whether to start (`all_or_none`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minidist.full import Recipe, vocabulary_parallel_cross_entropy_sum
from minidist.full.context.context_parallel import columns_of
from minidist.full.data.packed import Packed
from minidist.full.data.text import Samples
from minidist.full.ddp.sampler import DistributedSampler
from minidist.full.mesh import Mesh
from minidist.full.model import GPT, cross_entropy_sum
from minidist.full.precision.mixed import LossScaler
from minidist.full.trainer.batches import Batches
from minidist.full.trainer.checked import CheckedRun, device_of
from minidist.full.trainer.config import ConfigError
from minidist.full.trainer.resume import (
    Resumed,
    fingerprint,
    load_initial,
    origin_of,
    prepare,
)


@dataclass
class Start:
    """What a run starts from, on this rank.

    Attributes
    ----------
    model : GPT
        The whole model, with the weights of `--init` or drawn ones, without adapters.
    batches, held_out : Batches
        This rank's rows of the text to train on, and of that to measure on.
    scaler : LossScaler or None
        None but in float16.
    base : str
        The digest of what adapters stand beside; empty without adapters.
    origin : dict
        The `config.json` of the `--init` folder.
    resumed : Resumed or None
        Where the run continues.
    """

    model: GPT
    batches: Batches
    held_out: Batches | None
    scaler: LossScaler | None
    base: str
    origin: dict[str, Any]
    resumed: Resumed | None = None


def start_of(
    run: CheckedRun, samples: Samples | Packed, held_out: Samples | Packed | None = None
) -> Start:
    """Read and draw what a run starts from.

    Raises
    ------
    ConfigError
        If the weights of `--init` cannot be read, or are another model's.
    CheckpointError
        If the run is to be resumed and cannot be.
    """
    config, recipe, comm = run.config, run.fit.recipe, run.mesh.world
    generator = torch.Generator().manual_seed(config.run.seed)
    model = GPT(run.sizes, generator, dtype=config.dtype, device=device_of(comm))
    # adapters are saved without their base
    if config.run.init and (recipe.lora or not config.run.resume):
        load_initial(Path(config.run.init), model)
    start = Start(
        model,
        _batches(run, samples),
        _held_out(run, held_out) if config.run.eval_every else None,
        LossScaler(comm) if config.scales_loss else None,
        fingerprint(model) if recipe.lora else "",
        origin_of(config),
    )
    if config.run.resume:
        shapes = serial_model(run)
        start.resumed = prepare(config, shapes, start.base, start.batches, start.scaler, comm)
    return start


def _batches(run: CheckedRun, samples: Samples | Packed) -> Batches:
    """Return this rank's rows of the text to train on."""
    config, rows = run.config, run.mesh.rows
    sampler = DistributedSampler(
        len(samples),
        rows.size,
        rows.rank,
        config.run.seed,
        batch=config.data.batch,
        lengths=samples.lengths if config.data.by_length else None,
    )
    return _of(run, samples, sampler)


def _held_out(run: CheckedRun, samples: Samples | Packed | None) -> Batches:
    """Return this rank's rows of the text to measure on, in its order."""
    config, rows = run.config, run.mesh.rows
    if samples is None:
        raise ConfigError(
            f"--eval-every {config.run.eval_every}: the held-out text is too short for a sequence "
            f"of {config.data.sequence} tokens: use --eval-text FILE, or a larger --held-out"
        )
    in_order = DistributedSampler(
        len(samples), rows.size, rows.rank, batch=config.data.batch, shuffle=False
    )
    return _of(run, samples, in_order)


def _of(run: CheckedRun, samples: Samples | Packed, sampler: DistributedSampler) -> Batches:
    multiple = math.prod(run.fit.shares(run.mesh.layout).values())
    return Batches(samples, sampler, multiple, columns_of(run.fit.recipe, run.mesh))


def serial_model(run: CheckedRun) -> GPT:
    """Return a run's serial model on the device `meta`, with its adapters."""
    shapes = GPT(run.sizes, dtype=run.config.dtype, device="meta")
    run.fit.extend(shapes)
    return shapes


def loss_of(model: GPT, mesh: Mesh) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `loss(logits, targets)`, a sum over tokens, for logits as the head returns them on
    this mesh.
    """
    if mesh.layout.tp == 1:
        return cross_entropy_sum
    vocabulary = model.config.vocabulary
    return lambda logits, targets: vocabulary_parallel_cross_entropy_sum(
        logits, targets, mesh.tp, vocabulary
    )


def carried_of(model: GPT, mesh: Mesh, recipe: Recipe) -> Callable[[Tensor], Tensor]:
    """Return a function that maps inputs [b, T] to an empty tensor shaped like the activations
    between stages.

    They are [b, T, D], and [b, T/P, D] with sequence parallelism over P ranks.
    """
    hidden, dtype = model.config.hidden, model.embedding.weight.dtype
    share = mesh.layout.tp if recipe.sp else 1
    return lambda inputs: torch.empty(
        len(inputs), inputs.shape[1] // share, hidden, dtype=dtype, device="meta"
    )

"""What a run brings to `parallelize`: its loss, what goes from stage to stage, memory for shards,
and AdamW.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minidist.memory.offload import OffloadedOptimizer, mapped
from minidist.memory.precision.masters import MasterWeights
from minidist.mesh import Layout, Mesh
from minidist.model import GPT, GPTConfig, cross_entropy_sum
from minidist.parallel import Parallel, Recipe, vocabulary_parallel_cross_entropy_sum
from minidist.parallel.context.order import multiple, positions
from minidist.parallel.steps import adapt
from minidist.trainer.config import Config, ConfigError
from minidist.trainer.files import retold


def adapted(sizes: GPTConfig, dtype: torch.dtype, recipe: Recipe) -> GPT:
    """Return a serial model on the device `meta`, with the adapters of a recipe."""
    shapes = GPT(sizes, dtype=dtype, device="meta")
    adapt(shapes, recipe)
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
    share = mesh.layout.tp if recipe.sequence else 1
    return lambda inputs: torch.empty(
        len(inputs), inputs.shape[1] // share, hidden, dtype=dtype, device="meta"
    )


def tokens_multiple(recipe: Recipe, layout: Layout) -> int:
    """Return the number that must divide the tokens of a row: they are shared out along cp, then
    along tp with sp.
    """
    return multiple(recipe.cp_order, layout.cp) * (layout.tp if recipe.sequence else 1)


def columns_of(recipe: Recipe, mesh: Mesh) -> Callable[[int], Tensor] | None:
    """Return a function from the tokens of a row to the positions of those that this rank has;
    None: it has all.
    """
    cp = mesh.cp
    return (
        (lambda time: positions(recipe.cp_order, cp.size, cp.rank, time)) if cp.size > 1 else None
    )


def check_room(model: nn.Module, mesh: Mesh, config: Config) -> None:
    """Raise ConfigError if this rank's shards of parameters go into files and the disk has no room
    for them.
    """
    if config.parallel.zero == 3 and isinstance(config.offload_to, Path):
        layout = mesh.layout
        ranks = (config.parallel.hsdp or layout.dp * layout.cp) * layout.pp * layout.tp
        bytes = sum(parameter.nbytes for parameter in model.parameters()) // ranks
        with retold(ConfigError, OSError, before="--offload disk: "):
            mapped((bytes,), torch.uint8, config.offload_to, "this rank's part of the parameters")


def shard_memory(config: Config) -> Callable[[int, torch.dtype], Tensor] | None:
    """Return the function that allocates shards of parameters beside the optimizer's state; None:
    on the device.
    """
    place = config.offload_to if config.parallel.zero == 3 else None
    if isinstance(place, Path):
        return lambda count, dtype: mapped((count,), dtype, place, "parameters")
    if place == "cpu" and torch.cuda.is_available():
        return lambda count, dtype: torch.zeros(count, dtype=dtype, pin_memory=True)
    return None


def build_optimizer(parallel: Parallel, config: Config) -> MasterWeights:
    """Return AdamW over the parameters that this rank updates. It decays matrices and leaves norms
    alone.

    It updates 16-bit parameters through float32 masters. `--offload` says where its state lives.

    Raises
    ------
    ConfigError
        If the folder has no room.
    """
    options, offload_to = config.optimizer, config.offload_to
    groups = decay_groups(parallel.model, options.weight_decay)
    kind: Any = partial(OffloadedOptimizer, to=offload_to) if offload_to else MasterWeights
    betas = (options.beta1, options.beta2)
    with retold(ConfigError, OSError, before="--offload disk: "):
        built: MasterWeights = parallel.optimizer(
            kind, groups, optimizer=torch.optim.AdamW, lr=options.lr, betas=betas
        )
    return built


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the matrices, which are decayed, and the other parameters, without those that are
    frozen.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    others = [parameter for parameter in trained if parameter.dim() < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]

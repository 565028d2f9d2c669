"""The optimizer over what a rank updates, its learning rate, and where its state and its shards
lie.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minidist.full import Parallel
from minidist.full.data.files import retold
from minidist.full.memory.offload import mapped
from minidist.full.mesh import Mesh
from minidist.full.precision.masters import MasterWeights
from minidist.full.trainer.config import Config, ConfigError
from minidist.full.trainer.schedule import learning_rate, linear_scaling


def build_optimizer(parallel: Parallel, config: Config) -> MasterWeights:
    """Return AdamW over the parameters that this rank updates, or another optimizer.

    It decays matrices and leaves norms alone.

    It updates 16-bit parameters through float32 masters. `--offload` says where its state lives.

    Raises
    ------
    ConfigError
        If the folder has no room.
    """
    options = config.optimizer
    groups = decay_groups(parallel.model, options.weight_decay)
    kind, groups = config.updater(parallel.model, groups)
    betas = options.beta1, options.beta2
    adamw = torch.optim.AdamW
    with retold(ConfigError, OSError, before="--offload disk: "):
        built: MasterWeights = parallel.optimizer(
            kind, groups, optimizer=adamw, lr=options.lr, betas=betas
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


def rate_at(config: Config, step: int) -> float:
    """Return the learning rate of a step, counted from 0."""
    options = config.optimizer
    shape = options.lr_schedule
    total = config.run.steps
    batch = config.data.batch
    warmup = min(options.warmup, total)
    cooldown = 0
    if shape == "wsd":
        cooldown = min(options.cooldown or -(-total // 5), total - warmup)
    peak = linear_scaling(options.lr, options.base_batch or batch, batch)
    return learning_rate(step, peak, warmup, total, shape=shape, cooldown=cooldown)


def shard_memory(config: Config) -> Callable[[int, torch.dtype], Tensor] | None:
    """Return the function that allocates shards of parameters beside the optimizer's state; None:
    on the device.
    """
    if config.parallel.zero != 3:
        return None
    place = config.offload_to
    if isinstance(place, Path):
        return lambda count, dtype: mapped((count,), dtype, place, "parameters")
    if place == "cpu" and torch.cuda.is_available():
        return lambda count, dtype: torch.zeros(count, dtype=dtype, pin_memory=True)
    return None


def check_room(model: nn.Module, mesh: Mesh, config: Config) -> None:
    """Raise ConfigError if this rank's shards of parameters go into files and the disk has no room
    for them.
    """
    if config.parallel.zero == 3 and isinstance(config.offload_to, Path):
        layout = mesh.layout
        ranks = (config.parallel.hsdp or layout.data) * layout.pp * layout.tp
        bytes = sum(parameter.nbytes for parameter in model.parameters()) // ranks
        what = "this rank's part of the parameters"
        with retold(ConfigError, OSError, before="--offload disk: "):
            mapped((bytes,), torch.uint8, config.offload_to, what)

"""AdamW as a run wants it: over whole parameters or shards, with masters or without, its state here or elsewhere."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from minidist.memory.masters import MasterWeights
from minidist.memory.offload import OffloadedOptimizer
from minidist.parallel import DataParallel
from minidist.parallel.shard import Sharded
from minidist.trainer.config import Config


def build_optimizer(
    model: nn.Module,
    config: Config,
    replica: DataParallel | None = None,
    offload_to: Path | Literal["cpu"] | None = None,
) -> MasterWeights:
    """Return AdamW that decays matrices and leaves norms alone.

    It updates 16 bits through float32 masters; of what `replica` shards, this rank's slices. Its state lives in
    `offload_to`: a folder, host memory, or beside the parameters.

    Raises
    ------
    OSError
        If the folder has no room.
    """
    options = config.optimizer
    groups = decay_groups(model, options.weight_decay)
    kind: Any = partial(OffloadedOptimizer, to=offload_to) if offload_to else MasterWeights
    if isinstance(replica, Sharded):
        kind = partial(replica.optimizer, kind)
    built: MasterWeights = kind(
        groups, optimizer=torch.optim.AdamW, lr=options.lr, betas=(options.beta1, options.beta2)
    )
    return built


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the matrices, which are decayed, and the other parameters."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]

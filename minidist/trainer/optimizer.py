"""AdamW as a run wants it: over whole parameters or shards, with masters or without, its state here or elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from minidist.memory.offload import OffloadedOptimizer
from minidist.memory.precision.masters import MasterWeights
from minidist.parallel import Parallel
from minidist.trainer.config import Config, ConfigError


def build_optimizer(parallel: Parallel, config: Config) -> MasterWeights:
    """Return AdamW that decays matrices and leaves norms alone, over what this rank updates.

    It updates 16 bits through float32 masters. Its state lives in a folder, in host memory, or beside the parameters.

    Raises
    ------
    ConfigError
        If the folder has no room.
    """
    options, offload_to = config.optimizer, config.offload_to
    groups = decay_groups(parallel.model, options.weight_decay)
    kind: Any = partial(OffloadedOptimizer, to=offload_to) if offload_to else MasterWeights
    betas = (options.beta1, options.beta2)
    try:
        built: MasterWeights = parallel.optimizer(kind, groups, optimizer=torch.optim.AdamW, lr=options.lr, betas=betas)
    except OSError as error:
        raise ConfigError(f"--offload disk: {error.strerror}") from None
    return built


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the matrices, which are decayed, and the other parameters."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]

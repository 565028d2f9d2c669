"""What spreading a GPT needs to know of it: its loss, and what goes from stage to stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from minidist.memory.offload import mapped
from minidist.mesh import Mesh
from minidist.model import GPT, cross_entropy_sum
from minidist.parallel import Recipe, vocabulary_parallel_cross_entropy_sum
from minidist.trainer.config import Config, ConfigError


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


def shard_memory(config: Config) -> Callable[[int, torch.dtype], Tensor] | None:
    """Return what allocates shards of parameters where the optimizer's state lies, if that is not on the device."""
    if config.parallel.zero != 3:
        return None
    if isinstance(config.offload_to, Path):
        folder = config.offload_to
        return lambda count, dtype: mapped((count,), dtype, folder, "parameters")
    if config.offload_to == "cpu" and torch.cuda.is_available():
        return lambda count, dtype: torch.zeros(count, dtype=dtype, pin_memory=True)
    return None

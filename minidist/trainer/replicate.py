"""The data-parallel strategy that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from minidist.comm import Communicator
from minidist.memory.offload import mapped
from minidist.parallel import DDP, FSDP, DataParallel, NaiveDataParallel, ParameterServer, ZeRO1, ZeRO2
from minidist.trainer.config import Config, ConfigError

MIB = 1 << 20


def replicate(model: nn.Module, comm: Communicator, config: Config) -> DataParallel:
    """Spread training over the ranks of the data axis."""
    parallel = config.parallel
    if parallel.strategy == "naive":
        return NaiveDataParallel(model, comm)
    if parallel.strategy == "server":
        return ParameterServer(model, comm)
    if parallel.zero == 3:
        device = next(model.parameters()).device
        return FSDP(model, comm, shard_ranks=parallel.hsdp or None, allocate=_shard_memory(config, device))
    kind = (DDP, ZeRO1, ZeRO2)[parallel.zero]
    return kind(model, comm, bucket_bytes=int(parallel.bucket_mib * MIB))


def check_room(model: nn.Module, comm: Communicator, config: Config) -> None:
    """Raise ConfigError if this rank's shards of parameters are to lie in files, and the disk has no room for them."""
    if config.parallel.zero == 3 and isinstance(config.offload_to, Path):
        bytes = sum(parameter.nbytes for parameter in model.parameters()) // (config.parallel.hsdp or comm.size)
        try:
            mapped((bytes,), torch.uint8, config.offload_to, "this rank's part of the parameters")
        except OSError as error:
            raise ConfigError(f"--offload disk: {error.strerror}") from None


def _shard_memory(config: Config, device: torch.device) -> Callable[[int, torch.dtype], Tensor] | None:
    """Return what allocates shards of parameters where the optimizer's state lies, if that is not on the device."""
    if isinstance(config.offload_to, Path):
        folder = config.offload_to
        return lambda count, dtype: mapped((count,), dtype, folder, "parameters")
    if config.offload_to == "cpu" and device.type == "cuda":
        return lambda count, dtype: torch.zeros(count, dtype=dtype, pin_memory=True)
    return None

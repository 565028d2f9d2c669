"""Lesson 06, solved: `minidist/zero.py`, and `minidist/full/fsdp/fsdp.py` for the last task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist import Communicator
from minidist.ddp import views_into
from minidist.full import FSDP
from minidist.full.fsdp.flat import Shard
from minidist.zero import PlainZeRO, Unit


def cut(parameters: Sequence[Tensor], comm: Communicator) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return this rank's part of `parameters`, and what of each parameter it holds."""
    own = [nn.Parameter(parameter) for parameter in parameters]
    place = Shard(own, {parameter: str(number) for number, parameter in enumerate(own)}, comm)
    end_to_end = torch.cat([parameter.detach().flatten() for parameter in own])
    held = [
        (place.placements[parameter].start, place.placements[parameter].stop) for parameter in own
    ]
    return end_to_end[place.start : place.stop].clone(), held


class ShardedUnit:
    """A module of which a rank keeps a part."""

    def __init__(self, module: nn.Module, comm: Communicator) -> None:
        self.module, self.unit = module, Unit(module.parameters(), comm)
        self.shard = self.unit.shard
        self.release()

    def gather(self) -> None:
        """Make all parameters whole."""
        self.unit.unshard()

    def release(self) -> None:
        """Free all parameters but the shard."""
        self.unit.reshard()


class ShardedModel:
    """Modules that are called one after the other, each a unit."""

    def __init__(self, modules: Sequence[nn.Module], comm: Communicator) -> None:
        self.zero = PlainZeRO(modules, comm, stage=3)
        self.shards = self.zero.shards

    def forward(self, x: Tensor) -> Tensor:
        """Return what the modules make of this rank's `x`."""
        return self.zero.forward(x)

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """Return this rank's shard of each module's gradients."""
        self.zero.backward(gradient)
        gradients = [shard.grad for shard in self.shards]
        for shard in self.shards:
            shard.grad = None
        return gradients


class HybridModel:
    """Shards inside groups of ranks, replicas across them: FSDP, which gathers and reduces beside
    computing.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        comm: Communicator,
        shard_ranks: int,
        op: str = "sum",
        **options: Any,
    ) -> None:
        options |= {"allocate": in_plain_memory, "shard_ranks": shard_ranks}
        self.model = FSDP(nn.Sequential(*modules), comm, op, **options)
        self.shards = [flat.shard.values for flat in self.model.flats]

    def forward(self, x: Tensor) -> Tensor:
        """Return what the modules make of this rank's `x`."""
        self.model.zero_grad()
        self.output: Tensor = self.model(x)
        return self.output

    def backward(self, gradient: Tensor) -> list[Tensor]:
        """Return this rank's shard of each module's gradients."""
        self.output.backward(gradient)  # type: ignore[no-untyped-call]
        self.model.stepped()
        return [flat.shard.gradient for flat in self.model.flats if flat.shard.gradient is not None]


def in_plain_memory(count: int, dtype: torch.dtype) -> Tensor:
    """Return memory that is not registered: an all-gather then sends messages, which can be
    counted.
    """
    return torch.zeros(count, dtype=dtype)


__all__ = [
    "HybridModel",
    "ShardedModel",
    "ShardedUnit",
    "cut",
    "in_plain_memory",
    "views_into",
]

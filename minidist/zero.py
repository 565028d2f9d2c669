"""ZeRO: a rank updates only its shard of the parameters, and holds no more than it needs.

                 forward                      backward, last layer first                        step
    ZeRO-1       use                          use; in the end reduce-scatter all gradients      update shards, unshard
    ZeRO-2       use                          use, reduce-scatter its gradients, free them      update shards, unshard
    ZeRO-3       unshard, use, reshard        unshard, use, reshard, then as ZeRO-2             update shards

Unshard is an all-gather of the parameters, reshard frees them. Only rank r updates shard r, so only
rank r has its state. With n bytes of parameters on P ranks, each rank sends (P - 1)/P of 2 n bytes,
as much as plain data parallelism: an all-reduce is a reduce-scatter and an all-gather, with the
update in between. Stage 3 sends half as much again, since it gathers the parameters twice. AdamW
has 2 n bytes of state. Each rank holds:

                 parameters                   gradients                               shard and state
    DDP          n                            n                                       2 n
    ZeRO-1       n                            n, and n/P of the sum                   3 n/P
    ZeRO-2       n                            those of one layer, and n/P             3 n/P
    ZeRO-3       those of one layer           those of one layer, and n/P             3 n/P

This page has all three as loops over a list of layers, then stages 1 and 2 for any module by hooks;
stage 3 is `fsdp.py`. (Rajbhandari et al. 2020, section 5: P_os, P_os+g and P_os+g+p.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minidist.collectives import all_gather, reduce_scatter
from minidist.comm import Communicator
from minidist.ddp import (
    Owned,
    start_equal,
    take_gradients,
    views_into,
    when_gradient_arrives,
)


class Unit:
    """The trained parameters of a layer, one after the other in the flat tensor `unsharded`, and
    the `shard` of it that this rank updates.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], comm: Communicator) -> None:
        self.parameters, self.comm = list(parameters), comm
        self.missing = set(self.parameters)  # whose gradient backward has not reached
        self.unsharded = torch.cat([each.detach().flatten() for each in self.parameters])
        parts = self.unsharded.tensor_split(comm.size)
        self.shard = nn.Parameter(parts[comm.rank].clone())
        self.first = sum(len(part) for part in parts[: comm.rank])  # where the shard begins
        # From now on the parameters are views: what is gathered into the flat tensor is theirs.
        for parameter, view in zip(
            self.parameters, views_into(self.unsharded, self.parameters), strict=True
        ):
            parameter.data = view

    def unshard(self) -> None:
        """Gather every rank's shard into the parameters. Collective."""
        if not self.is_whole:
            # The same storage as before: autograd has saved views into it.
            self.unsharded.untyped_storage().resize_(self.unsharded.nbytes)
        all_gather(self.shard.detach(), self.comm, out=self.unsharded)

    def reshard(self) -> None:
        """Free the memory of the parameters; the shard stays."""
        self.unsharded.untyped_storage().resize_(0)

    @property
    def is_whole(self) -> bool:
        """True while the parameters have memory."""
        return self.unsharded.untyped_storage().nbytes() > 0

    def reduce_scatter(self) -> None:
        """Add this rank's shard of the summed gradients to `shard.grad`; free the whole gradients.

        Collective.
        """
        summed = reduce_scatter(take_gradients(self.parameters), self.comm)
        self.shard.grad = summed if self.shard.grad is None else self.shard.grad + summed
        self.missing = set(self.parameters)

    def owned(self) -> Iterator[Owned]:
        """Yield which elements of which parameters the shard holds."""
        last, begin = self.first + len(self.shard), 0
        for parameter in self.parameters:
            end = begin + parameter.numel()
            start, stop = max(self.first, begin), min(last, end)
            if start < stop:
                where = (start - begin, stop - begin)
                yield Owned(parameter, *where, self.shard, start - self.first)
            begin = end


def units_of(
    module: nn.Module, blocks: Iterable[nn.Module], comm: Communicator
) -> list[tuple[nn.Module, Unit]]:
    """Return a unit for each block, and before them one for the parameters outside of blocks.

    Each comes with the module in whose forward it is used. What is frozen belongs to no unit.
    """
    owners = {
        parameter: block
        for block in [module, *blocks]  # the last word has the block
        for parameter in block.parameters()
        if parameter.requires_grad
    }
    parts: dict[nn.Module, list[nn.Parameter]] = {module: []}
    for parameter, owner in owners.items():
        parts.setdefault(owner, []).append(parameter)
    return [(owner, Unit(part, comm)) for owner, part in parts.items() if part]


# ---------------------------------------------------------------- the idea


class PlainZeRO:
    """Layers that are called one after the other, under ZeRO of stage 1, 2 or 3, without hooks.

    zero = PlainZeRO(layers, comm, stage=3)
    optimizer = torch.optim.AdamW(zero.shards)
    output = zero.forward(inputs)           a leaf: backward begins with its gradient
    loss_of(output).backward()
    zero.backward(output.grad)
    zero.step(optimizer)

    Gradients are summed over ranks, so each rank divides its loss by the tokens of all ranks.
    """

    def __init__(self, layers: Sequence[nn.Module], comm: Communicator, stage: int) -> None:
        for layer in layers:
            start_equal(layer, comm)
        self.layers, self.stage = layers, stage
        self.units = [Unit(layer.parameters(), comm) for layer in layers]
        self.shards = [unit.shard for unit in self.units]
        if stage == 3:
            for unit in self.units:
                unit.reshard()

    def forward(self, x: Tensor) -> Tensor:
        """Call the layers. The graph is cut after each, so that backward can take one at a time."""
        self.ends: list[tuple[Tensor, Tensor]] = []  # what went into each layer, and what came out
        for layer, unit in zip(self.layers, self.units, strict=True):
            x = x.detach().requires_grad_()
            if self.stage == 3:
                unit.unshard()
            y = layer(x)
            if self.stage == 3:
                unit.reshard()
            self.ends.append((x, y))
            x = y
        return x.detach().requires_grad_()

    def backward(self, gradient: Tensor | None) -> None:
        """Go back from the gradient of `forward`'s output; add to the gradients of the shards."""
        for unit in reversed(self.units):
            x, y = self.ends.pop()
            if self.stage == 3:
                unit.unshard()
            torch.autograd.backward(y, gradient)
            if self.stage == 3:
                unit.reshard()
            if self.stage >= 2:
                unit.reduce_scatter()
            gradient = x.grad
        if self.stage == 1:
            for unit in self.units:
                unit.reduce_scatter()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update this rank's shards; stages 1 and 2 gather the others' now, stage 3 when it uses
        them.
        """
        optimizer.step()
        optimizer.zero_grad()
        if self.stage < 3:
            for unit in self.units:
                unit.unshard()


# ---------------------------------------------------------------- the class, for any module


class ZeRO(nn.Module):
    """A module under ZeRO of stage 1 or 2: hooks do what `PlainZeRO` does in loops.

    model = ZeRO(model, comm, stage=2, blocks=model.layers)
    optimizer = torch.optim.AdamW(model.trained)
    loss_of(model(tokens)).backward()
    model.finish()                      the gradients of the shards are complete
    optimizer.step()
    model.publish()                     every rank has all updated parameters

    Parameters
    ----------
    module, comm
        As for `DDP`; gradients are summed.
    stage : {1, 2}
        See above.
    blocks : iterable of nn.Module
        What is reduced together in stage 2; what is outside of them is one more unit.
    """

    def __init__(
        self, module: nn.Module, comm: Communicator, stage: int, blocks: Iterable[nn.Module] = ()
    ) -> None:
        super().__init__()
        start_equal(module, comm)
        self.module, self.stage = module, stage
        self.owners = units_of(module, blocks, comm)
        self.units = [unit for _, unit in self.owners]
        self.unit_of = {each: unit for unit in self.units for each in unit.parameters}
        self.trained = [unit.shard for unit in self.units]
        self.next = len(self.units) - 1  # to be reduced; backward reaches the last layers first
        self.hooks = when_gradient_arrives(list(self.unit_of), self.gradient_arrived)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the module."""
        return self.module(*inputs, **options)

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """In stage 2, reduce the gradients of a unit as soon as all of them are there."""
        self.unit_of[parameter].missing.discard(parameter)
        # In one order on all ranks, whichever unit is full first: collectives must match.
        while self.stage >= 2 and not self.units[self.next].missing:
            self.reduce_next()

    def reduce_next(self) -> None:
        """Reduce the gradients of the unit whose turn it is."""
        self.units[self.next].reduce_scatter()
        self.next = (self.next - 1) % len(self.units)

    def finish(self) -> None:
        """Reduce what has not been reduced: in stage 1 all, in stage 2 what backward did not fill.

        Collective.
        """
        if any(len(unit.missing) < len(unit.parameters) for unit in self.units):
            for _ in range(self.next + 1):
                self.reduce_next()

    def publish(self) -> None:
        """Gather all shards after the optimizer's step. Collective."""
        for unit in self.units:
            unit.unshard()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients without messages in stage 1; stage 2 reduces each backward's."""
        yield

    def owned(self) -> Iterator[Owned]:
        """Yield what this rank updates: its shards."""
        for unit in self.units:
            yield from unit.owned()

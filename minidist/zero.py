"""ZeRO: a rank updates only its shard of the parameters, and holds no more than it needs.

                 forward                      backward, last layer first                        step
    ZeRO-1       use                          use; in the end reduce-scatter all gradients      update shards, unshard
    ZeRO-2       use                          use, reduce-scatter its gradients, free them      update shards, unshard
    ZeRO-3       unshard, use, reshard        unshard, use, reshard, then as ZeRO-2             update shards

Unshard is an all-gather of the parameters, reshard frees them. Only rank r updates shard r, so only
rank r has its state. With n bytes of parameters on P ranks, each rank sends (P - 1)/P of 2 n bytes,
as much as plain data parallelism: an all-reduce is a reduce-scatter and an all-gather, with the
update in between. Stage 3 sends 3 n for each microbatch: it gathers the parameters twice. AdamW has
2 n bytes of state. Each rank holds:

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

import torch
from torch import Tensor, nn

from minidist.collectives import all_gather, reduce_scatter
from minidist.comm import Communicator
from minidist.ddp import DataParallel, Owned, start_equal, take_gradients, views_into


class Unit:
    """Parameters of a layer, one after the other in the flat tensor `unsharded`.

    This rank updates the `shard` of it that begins at `first`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], comm: Communicator) -> None:
        self.parameters, self.comm = list(parameters), comm
        self.unsharded = torch.cat([each.detach().flatten() for each in self.parameters])
        parts = self.unsharded.tensor_split(comm.size)
        self.first = sum(len(part) for part in parts[: comm.rank])
        self.shard = nn.Parameter(parts[comm.rank].clone())
        # From now on the parameters are views: what is gathered into the flat tensor is theirs.
        views = views_into(self.unsharded, self.parameters)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view

    def unshard(self) -> None:
        """Gather every rank's shard into the parameters. Collective."""
        storage = self.unsharded.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.unsharded.nbytes)  # in place: autograd has saved views into it
        all_gather(self.shard.detach(), self.comm, out=self.unsharded)

    def reshard(self) -> None:
        """Free the memory of the parameters; the shard stays."""
        self.unsharded.untyped_storage().resize_(0)

    def reduce_scatter(self) -> None:
        """Add this rank's shard of the summed gradients to `shard.grad`; free them. Collective."""
        summed = reduce_scatter(take_gradients(self.parameters), self.comm)
        self.shard.grad = summed if self.shard.grad is None else self.shard.grad + summed

    def owned(self) -> Iterator[Owned]:
        """Yield which elements of which parameters the shard holds."""
        begin = -self.first  # where the parameter begins, counted from the shard's first element
        for parameter in self.parameters:
            end = begin + parameter.numel()
            start, stop = max(begin, 0), min(end, len(self.shard))
            if start < stop:
                yield Owned(parameter, start - begin, stop - begin, self.shard, start)
            begin = end


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

    @contextmanager
    def whole(self, unit: Unit) -> Iterator[None]:
        """Have a unit's parameters whole in the body; below stage 3 they always are."""
        if self.stage == 3:
            unit.unshard()
        yield
        if self.stage == 3:
            unit.reshard()

    def forward(self, x: Tensor) -> Tensor:
        """Call the layers. The graph is cut after each, so that backward can take one at a time."""
        self.ends: list[tuple[Tensor, Tensor]] = []  # what went into each layer, and what came out
        for layer, unit in zip(self.layers, self.units, strict=True):
            x = x.detach().requires_grad_()
            with self.whole(unit):
                y = layer(x)
            self.ends.append((x, y))
            x = y
        return x.detach().requires_grad_()

    def backward(self, gradient: Tensor | None) -> None:
        """Go back from the gradient of `forward`'s output; add to the gradients of the shards."""
        for unit in reversed(self.units):
            x, y = self.ends.pop()
            with self.whole(unit):
                torch.autograd.backward(y, gradient)
            if self.stage >= 2:
                unit.reduce_scatter()
            gradient = x.grad
        if self.stage == 1:
            for unit in self.units:
                unit.reduce_scatter()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update this rank's shards; below stage 3, gather those of the others now."""
        optimizer.step()
        optimizer.zero_grad()
        if self.stage < 3:
            for unit in self.units:
                unit.unshard()


# ---------------------------------------------------------------- the class, for any module


class ZeRO(DataParallel):
    """A module under ZeRO 1 or 2, `PlainZeRO` by hooks; to run, `minidist.full.ZeRO1`, `ZeRO2`.

    model = ZeRO(model, comm, stage=2, blocks=model.layers)
    optimizer = torch.optim.AdamW(model.trained)
    loss_of(model(tokens)).backward()
    model.finish()                      the gradients of the shards are complete
    optimizer.step()
    model.publish()                     every rank has all updated parameters

    Each block is a unit, and what is outside of blocks is one more. As soon as backward has
    completed the gradients of a unit, they are summed and freed: unlike the table, in stage 1, too.
    Under `no_sync` stage 1 adds up whole gradients, and stage 2 reduces those of each backward.
    """

    def __init__(
        self, module: nn.Module, comm: Communicator, stage: int, blocks: Iterable[nn.Module] = ()
    ) -> None:
        start_equal(module, comm)
        parts = parts_of(module, blocks)
        super().__init__(module, list(parts.values()), each_backward=stage > 1)
        self.layers = list(parts)
        self.units = [Unit(part, comm) for part in self.parts]
        self.trained = [unit.shard for unit in self.units]

    def launch(self, number: int) -> None:
        """Reduce the gradients of a unit."""
        self.units[number].reduce_scatter()

    def publish(self) -> None:
        """Gather all shards after the optimizer's step. Collective."""
        for unit in self.units:
            unit.unshard()

    def owned(self) -> Iterator[Owned]:
        """Yield what this rank updates: its shards."""
        for unit in self.units:
            yield from unit.owned()


def parts_of(module: nn.Module, blocks: Iterable[nn.Module]) -> dict[nn.Module, list[nn.Parameter]]:
    """Return the trained parameters of each block, in the order in which backward completes them.

    The last part, that of `module`, has the parameters outside of blocks.
    """
    parts: dict[nn.Module, list[nn.Parameter]] = {}
    seen: set[nn.Parameter] = set()
    for layer in [*reversed(list(blocks)), module]:
        own = [each for each in layer.parameters() if each.requires_grad and each not in seen]
        seen.update(own)
        if own:
            parts[layer] = own
    return parts

"""ZeRO 1, 2 and 3 on a page: loops over a list of layers, one after the other, without hooks.

                 forward                      backward, last layer first                        step
    ZeRO-1       use                          use; in the end reduce-scatter all gradients      update shards, unshard
    ZeRO-2       use                          use, reduce-scatter its gradients, free them      update shards, unshard
    ZeRO-3       unshard, use, reshard        unshard, use, reshard, then as ZeRO-2             update shards

Unshard is an all-gather of the parameters, reshard frees them. Only rank r updates shard r, so only
rank r has its state. With n bytes of parameters on P ranks, each rank sends (P - 1)/P of 2 n bytes,
in stage 3 of 3 n bytes. AdamW has 2 n bytes of state. Each rank holds:

                 parameters                   gradients                               shard and state
    ZeRO-1       n                            n, and n/P of the sum                   3 n/P
    ZeRO-2       n                            those of one layer, and n/P             3 n/P
    ZeRO-3       those of one layer           those of one layer, and n/P             3 n/P

(Rajbhandari et al. 2020, section 5: P_os, P_os+g and P_os+g+p.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minidist.full.collectives import all_gather, reduce_scatter
from minidist.full.comm import Communicator
from minidist.full.ddp.flatten import make_room, take_gradients, views_into
from minidist.full.fsdp.layers import start_equal


class PlainUnit:
    """The trained parameters of a layer: `unsharded` while they are used, and the `shard` that this
    rank updates.
    """

    def __init__(self, layer: nn.Module, comm: Communicator) -> None:
        self.layer, self.comm = layer, comm
        self.parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        self.unsharded = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        self.views = views_into(self.unsharded, self.parameters)
        self.shard = nn.Parameter(self.unsharded.tensor_split(comm.size)[comm.rank].clone())
        self.show(self.views)

    def unshard(self) -> None:
        """Gather every rank's shard into the same memory as before: autograd has saved views into
        it.
        """
        all_gather(self.shard.detach(), self.comm, out=make_room(self.unsharded))
        self.show(self.views)

    def reshard(self) -> None:
        """Free all parameters but the shard; until the next `unshard` they read as NaN."""
        self.show([self.shard.new_full((), torch.nan).expand_as(view) for view in self.views])
        self.unsharded.untyped_storage().resize_(0)

    def reduce_scatter(self) -> None:
        """Add this rank's shard of the summed gradients to `shard.grad`, and free the whole
        gradients.
        """
        shard = reduce_scatter(take_gradients(self.parameters), self.comm)
        self.shard.grad = shard if self.shard.grad is None else self.shard.grad + shard

    def show(self, values: Sequence[Tensor]) -> None:
        """Let the layer's parameters be these `values`."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value


class PlainZeRO:
    """Layers that are called one after the other, under ZeRO of stage 1, 2 or 3.

    zero = PlainZeRO(layers, comm, stage=3)
    optimizer = torch.optim.AdamW(zero.shards)
    output = zero.forward(inputs)           a leaf: backward begins with its gradient
    loss_of(output).backward()
    zero.backward(output.grad)
    zero.step(optimizer)

    Gradients are summed over ranks, so each rank divides its loss by the tokens of all ranks.
    """

    def __init__(self, layers: Sequence[nn.Module], comm: Communicator, stage: int) -> None:
        start_equal(layers, comm, stage)
        self.units, self.stage = [PlainUnit(layer, comm) for layer in layers], stage
        self.shards = [unit.shard for unit in self.units]
        for unit in self.units:
            if stage == 3:
                unit.reshard()

    def forward(self, x: Tensor) -> Tensor:
        """Call the layers.

        The graph is cut after each, so that backward can go through them one at a time.
        """
        self.ends: list[tuple[Tensor, Tensor]] = []  # what went into each layer, and what came out
        for unit in self.units:
            x = x.detach().requires_grad_(x.requires_grad)
            if self.stage == 3:
                unit.unshard()
            y = unit.layer(x)
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
        """Update this rank's shards.

        Stages 1 and 2 gather the others' now, stage 3 with the next `unshard`.
        """
        optimizer.step()
        optimizer.zero_grad()
        if self.stage < 3:
            for unit in self.units:
                unit.unshard()

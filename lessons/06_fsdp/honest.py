"""Lesson 06, an honest answer: fully sharded data parallelism by hand, from the handout alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

import minidist
from minidist import Communicator
from minidist.full.collectives import all_gather, all_reduce, reduce_scatter


def end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements of `tensors` in one new tensor, without a gradient."""
    flat = [tensor.detach().flatten() for tensor in tensors]
    return torch.cat(flat) if flat else torch.empty(0)


def shard_lengths(elements: int, ranks: int) -> list[int]:
    """Return the length of each rank's part, as `torch.tensor_split` cuts: the first ones are
    longer by one.
    """
    shorter, longer = divmod(elements, ranks)
    return [shorter + (rank < longer) for rank in range(ranks)]


def cut(parameters: Sequence[Tensor], comm: Communicator) -> tuple[Tensor, list[tuple[int, int]]]:
    """Task 1: return this rank's part of `parameters`, and what of each parameter it holds."""
    lengths = shard_lengths(sum(parameter.numel() for parameter in parameters), comm.size)
    start = sum(lengths[: comm.rank])
    stop = start + lengths[comm.rank]
    shard = end_to_end(parameters)[start:stop].clone()
    held, offset = [], 0
    for parameter in parameters:
        size = parameter.numel()
        first, last = (min(max(border - offset, 0), size) for border in (start, stop))
        held.append((first, last))
        offset += size
    return shard, held


def views_into(whole: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Task 1, too: return for each parameter a tensor of its shape that lies in the memory of
    `whole`.
    """
    ends = accumulate(parameter.numel() for parameter in parameters)
    return [
        whole[end - parameter.numel() : end].view(parameter.shape)
        for parameter, end in zip(parameters, ends, strict=True)
    ]


class ShardedUnit:
    """Task 2: a module of which a rank keeps a part, and which is whole from `gather` to
    `release`.
    """

    def __init__(self, module: nn.Module, comm: Communicator) -> None:
        self.module, self.comm = module, comm
        parameters = list(module.parameters())
        self.shard, _ = cut(parameters, comm)
        elements = sum(parameter.numel() for parameter in parameters)
        self.lengths = shard_lengths(elements, comm.size)
        self.whole = torch.empty(elements, dtype=self.shard.dtype)
        for parameter, view in zip(parameters, views_into(self.whole, parameters), strict=True):
            parameter.data = view
        self.release()

    def gather(self) -> None:
        """Have all parameters whole, in the memory where they were before."""
        gathered = all_gather(self.shard, self.comm, counts=self.lengths)
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self.whole.copy_(gathered)

    def release(self) -> None:
        """Free all parameters but the shard, also those that autograd has saved."""
        self.whole.untyped_storage().resize_(0)


class ShardedModel:
    """Task 3: modules that are called one after the other, each a unit that is whole only while it
    is needed.
    """

    shards: list[Tensor]

    def __init__(self, modules: Sequence[nn.Module], comm: Communicator) -> None:
        self.comm = comm
        self.units = [ShardedUnit(module, comm) for module in modules]
        self.shards = [unit.shard for unit in self.units]
        # of each module, what went in and what came out
        self.ends: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return what the modules make of this rank's `x`."""
        self.ends = []
        for unit in self.units:
            x = x.detach().requires_grad_()
            unit.gather()
            output = unit.module(x)
            unit.release()
            self.ends.append((x, output))
            x = output
        return x.detach()

    def backward(self, gradient: Tensor) -> list[Tensor]:
        """Return this rank's shard of each module's gradients, summed over the ranks, in the order
        of the modules.
        """
        shards = []
        for unit in reversed(self.units):
            x, output = self.ends.pop()
            unit.gather()
            output.backward(gradient)
            unit.release()
            assert x.grad is not None
            gradient = x.grad
            shards.append(self.reduce(unit))
        return shards[::-1]

    def reduce(self, unit: ShardedUnit) -> Tensor:
        """Take the gradients off a unit's parameters, and return this rank's shard of their sum
        over the ranks.
        """
        gradients = []
        for parameter in unit.module.parameters():
            unused = torch.zeros(parameter.shape, dtype=parameter.dtype)
            gradients.append(unused if parameter.grad is None else parameter.grad)
            parameter.grad = None
        return reduce_scatter(end_to_end(gradients), self.comm)


class HybridModel(ShardedModel):
    """Task 4: shards inside groups of ranks, replicas across them."""

    def __init__(self, modules: Sequence[nn.Module], comm: Communicator, shard_ranks: int) -> None:
        group, place = divmod(comm.rank, shard_ranks)
        super().__init__(modules, comm.split(group))
        self.replicas = comm.split(place)

    def reduce(self, unit: ShardedUnit) -> Tensor:
        """Sum inside the group as before, then the shard over the groups."""
        shard = super().reduce(unit)
        all_reduce(shard, self.replicas)
        return shard


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()

    def modules() -> list[nn.Module]:
        layers = [nn.Linear(2, 2, dtype=torch.float64) for _ in range(3)]
        for number, layer in enumerate(layers):
            for parameter in layer.parameters():
                nn.init.constant_(parameter, number + 1.0)
        return list(layers)

    def task_1() -> str:
        shard, held = cut([torch.arange(4.0).view(2, 2), torch.arange(3.0)], comm)
        return f"of a matrix of 4 and a vector of 3, this rank has {shard.tolist()}: {held}"

    def task_2() -> str:
        unit = ShardedUnit(modules()[1], comm)
        unit.gather()
        whole = [parameter.detach().flatten().tolist() for parameter in unit.module.parameters()]
        unit.release()
        return f"the shard is {unit.shard.tolist()}, gathered the parameters are {whole}"

    def step(model: ShardedModel) -> str:
        output = model.forward(torch.full((1, 2), 1.0 + comm.rank, dtype=torch.float64))
        gradients = model.backward(torch.ones_like(output))
        return (
            f"the output is {output.tolist()}, the first shard's gradient {gradients[0].tolist()}"
        )

    def task_3() -> str:
        return step(ShardedModel(modules(), comm))

    def task_4() -> str:
        return step(HybridModel(modules(), comm, shard_ranks=2 if comm.size % 2 == 0 else 1))

    for number, task in enumerate((task_1, task_2, task_3, task_4), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()

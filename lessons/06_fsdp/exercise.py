"""Lesson 06: fully sharded data parallelism. A rank keeps 1/P of every parameter, and borrows the rest.

    forward     gather 1, use 1, free 1     gather 2, use 2, free 2     ...
    backward    gather 2, use 2, free 2, reduce-scatter its gradients   gather 1, ...

Fill in the functions and classes; their docstrings are the contract. You need torch, `comm.rank`, `comm.size`,
`comm.split`, and three collectives of earlier lessons, which all ranks call in the same order:

    all_gather(shard, comm, counts=[...])   returns every rank's shard, one after the other, in a new tensor; counts
                                            says how many elements each rank brings
    reduce_scatter(full, comm)              returns part comm.rank of the sum over all ranks, cut as
                                            torch.tensor_split(full, comm.size) does
    all_reduce(tensor, comm)                replaces it by the sum over all ranks, in place

`minidist.parallel`, which has all of this, is what you are building: calling it scores nothing.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 06             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import minidist
from minidist import Communicator
from minidist.collectives import all_gather, all_reduce, reduce_scatter  # noqa: F401


def cut(parameters: Sequence[Tensor], comm: Communicator) -> tuple[Tensor, list[tuple[int, int]]]:
    """Task 1: return this rank's part of `parameters`, and what of each parameter it holds. No messages.

    Parameters
    ----------
    parameters : sequence of tensors
        One at least, of one dtype and any shapes. Flattened and laid end to end they are cut as `torch.tensor_split`
        cuts for `comm.size` ranks: as evenly as can be, longer parts first.

    Returns
    -------
    shard : Tensor
        One-dimensional, with memory of its own: a view would keep all of the parameters alive. No gradient.
    held : list of (first, last)
        For each parameter: elements first <= i < last of it, flattened, are in the shard. Where there are none,
        first == last.
    """
    raise NotImplementedError("task 1 is not started")


def views_into(whole: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Task 1, too: return for each parameter a tensor of its shape that lies in the memory of `whole`.

    Parameters
    ----------
    whole : Tensor
        One-dimensional, as long as all parameters together. What is written into it later, the views show.
    parameters : sequence of tensors
        Only their shapes count.
    """
    raise NotImplementedError("task 1 is not started")


class ShardedUnit:
    """Task 2: a module of which a rank keeps a part, and which is whole from `gather` to `release`.

    Parameters
    ----------
    module : nn.Module
        The same on every rank. It has a parameter at least; all are of one dtype, and all get a gradient. They stay
        the same `nn.Parameter` objects with the same shapes for ever; assign to `parameter.data` to change where they
        lie.

    Attributes
    ----------
    module : nn.Module
    shard : Tensor
        This rank's part, as `cut` returns it. Who trains changes it in place; the next `gather` brings the new values.

    Outside of `gather` ... `release`, also when the constructor has returned, nothing but the shard has memory. (While
    `gather` runs, what was gathered may be there twice for a moment.)
    """

    def __init__(self, module: nn.Module, comm: Communicator) -> None:
        raise NotImplementedError("task 2 is not started")

    def gather(self) -> None:
        """Have all parameters whole: one all-gather, (P - 1)/P of their bytes sent.

        What autograd saved of the parameters before a `release` must be valid again: for this the new values have to
        be in the memory where the old ones were. Keep one tensor for the whole, of which the parameters are views, and
        give its memory back with `tensor.untyped_storage().resize_(tensor.nbytes)`. Copy what was gathered into it. (Do
        not pass it to a collective: numpy would look at its memory, and then torch no longer resizes that.)
        """
        raise NotImplementedError("task 2 is not started")

    def release(self) -> None:
        """Free all parameters but the shard, also those that autograd has saved: `untyped_storage().resize_(0)`."""
        raise NotImplementedError("task 2 is not started")


class ShardedModel:
    """Task 3: modules that are called one after the other, each a unit that is whole only while it is needed.

    Parameters
    ----------
    modules : sequence of nn.Module
        Each takes the output of the one before: floating point, as `x` is. The same on every rank.
    comm : Communicator
        Of the ranks that share the parameters out among them.

    Attributes
    ----------
    shards : list of tensors
        This rank's part of each module's parameters, as `ShardedUnit.shard`.

    Not more than two units may be whole at any time, and none when a method has returned.
    """

    shards: list[Tensor]

    def __init__(self, modules: Sequence[nn.Module], comm: Communicator) -> None:
        raise NotImplementedError("task 3 is not started")

    def forward(self, x: Tensor) -> Tensor:
        """Return what the modules make of this rank's `x`. Every unit is gathered once.

        What is returned may be detached: nobody but your `backward` goes back from it.
        """
        raise NotImplementedError("task 3 is not started")

    def backward(self, gradient: Tensor) -> list[Tensor]:
        """Return this rank's shard of each module's gradients, summed over the ranks, in the order of the modules.

        Parameters
        ----------
        gradient : Tensor
            Of the output that the last `forward` returned, on this rank: `output.backward(gradient)` is what you would
            call on a single rank.

        Every unit is gathered once more, before its turn comes. After its turn its gradients are reduce-scattered, and
        the whole gradients are dropped: set `parameter.grad` to None. When this returns, no parameter has a `.grad`. At
        any time before, the parameters of at most two modules have one.

        A way without hooks: let `forward` cut the graph at each module, which it calls with
        `x.detach().requires_grad_()`, and keep what goes in and what comes out. Then each module's output has a
        `backward` of its own, and the gradient of its input is that of the output before. One call of `forward`
        precedes each call of this.
        """
        raise NotImplementedError("task 3 is not started")


class HybridModel(ShardedModel):
    """Task 4: shards inside groups of ranks, replicas across them.

    Parameters
    ----------
    modules, comm
        As for `ShardedModel`.
    shard_ranks : int
        The size of a group, such as the ranks of a node; it divides `comm.size`. Group g has ranks g * shard_ranks and
        following. Parameters are cut for the ranks of one group, so the first rank of each group holds the same.

    `forward` and `backward` do what they did, but parameters are gathered inside the group only, and the gradients are
    summed over *all* ranks. Between groups, ranks that hold the same shard send each other nothing but that shard of
    the gradients: one all-reduce for each unit, so that the first ones are under way while backward goes on.
    `comm.split(color)` returns the communicator of all ranks that give the
    same color, ordered by rank.
    """

    def __init__(self, modules: Sequence[nn.Module], comm: Communicator, shard_ranks: int) -> None:
        raise NotImplementedError("task 4 is not started")


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
        return f"the output is {output.tolist()}, the first shard's gradient {gradients[0].tolist()}"

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

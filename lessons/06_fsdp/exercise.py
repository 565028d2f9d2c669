"""Lesson 06: fully sharded data parallelism. A rank keeps 1/P of every parameter, and gathers the
rest when needed.

    forward     gather 1, use 1, free 1     gather 2, use 2, free 2     ...
    backward    gather 2, use 2, free 2, reduce-scatter its gradients   gather 1, ...

Fill in the functions and classes; their docstrings are the contract. You need torch, `comm.rank`,
`comm.size`, `comm.split`, and three collectives of earlier lessons. All ranks must call them in the
same order:

    all_gather(shard, comm, counts=[...])   returns every rank's shard, one after the other, in a new tensor; counts
                                            says how many elements the shard of each rank has
    reduce_scatter(full, comm)              returns part comm.rank of the sum over all ranks, cut as
                                            torch.tensor_split(full, comm.size) does
    all_reduce(tensor, comm)                replaces it by the sum over all ranks, in place

You are building what `minidist.full` does, so calling it scores nothing.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 06             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import minidist
from minidist import Communicator
from minidist.full.collectives import all_gather, all_reduce, reduce_scatter  # noqa: F401


def cut(parameters: Sequence[Tensor], comm: Communicator) -> tuple[Tensor, list[tuple[int, int]]]:
    """Task 1, first half: return (shard, held): this rank's part of `parameters`, and where it
    lies. Send nothing.

    Parameters
    ----------
    parameters : sequence of tensors
        At least one, all of one dtype, of any shapes. Flatten them, lay them end to end, and cut
        the result as `torch.tensor_split` does for `comm.size` ranks: as evenly as possible, longer
        parts first.

    Returns
    -------
    shard : Tensor
        One-dimensional, with its own memory: a view would keep all of the parameters alive. It
        requires no gradient.
    held : list of (first, last)
        For each parameter: the shard has the elements first <= i < last of this parameter,
        flattened. If it has none, first == last.
    """
    raise NotImplementedError("task 1 is not started")


def views_into(whole: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Task 1, second half: return, for each parameter, a view of `whole` that has the shape of the
    parameter.

    Parameters
    ----------
    whole : Tensor
        One-dimensional, as long as all parameters together, in their order. The views share its
        memory: they show values that are written into it later.
    parameters : sequence of tensors
        Use only their shapes.
    """
    raise NotImplementedError("task 1 is not started")


class ShardedUnit:
    """Task 2: a module of which each rank keeps a part; the module is whole from `gather` to
    `release`.

    Parameters
    ----------
    module : nn.Module
        The same on every rank. It has at least one parameter; all have one dtype, and all get a
        gradient. They must stay the same `nn.Parameter` objects with the same shapes; assign to
        `parameter.data` to change their memory.

    Attributes
    ----------
    module : nn.Module
    shard : Tensor
        This rank's part, as `cut` returns it. The caller changes it in place to train; the next
        `gather` must bring the new values.

    Before `gather` and after `release`, also when the constructor has returned, only the shard has
    memory. (While `gather` runs, the gathered values may exist twice for a moment.)
    """

    def __init__(self, module: nn.Module, comm: Communicator) -> None:
        raise NotImplementedError("task 2 is not started")

    def gather(self) -> None:
        """Make all parameters whole, with one all-gather that sends (P - 1)/P of their bytes.

        Tensors that autograd saved before a `release` must become valid again. So the new values
        have to be in the same storage as the old ones. Keep one tensor for the whole unit, and let
        the parameters be views of it. Allocate its memory again with
        `tensor.untyped_storage().resize_(tensor.nbytes)`, and copy the gathered values into it. (Do
        not pass this tensor to a collective: numpy would take a view of its memory, and then torch
        can no longer resize it.)
        """
        raise NotImplementedError("task 2 is not started")

    def release(self) -> None:
        """Free all parameters except the shard, also those that autograd has saved:
        `untyped_storage().resize_(0)`.
        """
        raise NotImplementedError("task 2 is not started")


class ShardedModel:
    """Task 3: modules that are called one after the other, each a unit that is whole only while it
    is needed.

    Parameters
    ----------
    modules : sequence of nn.Module
        Each takes the output of the one before. `x` and all outputs are floating point. The same on
        every rank.
    comm : Communicator
        The ranks over which the parameters are sharded.

    Attributes
    ----------
    shards : list of tensors
        This rank's part of each module's parameters, as in `ShardedUnit.shard`.

    At most two units may be whole at any time, and none when a method has returned.
    """

    shards: list[Tensor]

    def __init__(self, modules: Sequence[nn.Module], comm: Communicator) -> None:
        raise NotImplementedError("task 3 is not started")

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the last module for this rank's `x`. Gather every unit once.

        The output may be detached: only your own `backward` goes back from it.
        """
        raise NotImplementedError("task 3 is not started")

    def backward(self, gradient: Tensor) -> list[Tensor]:
        """Return this rank's shard of each module's gradients, summed over the ranks, in the order
        of the modules.

        Parameters
        ----------
        gradient : Tensor
            The gradient of the output that the last `forward` returned on this rank. On a single
            rank without sharding you would call `output.backward(gradient)`.

        Gather every unit once more before its backward. After its backward, reduce-scatter its
        gradients and drop the whole gradients: set `parameter.grad` to None. When this method
        returns, no parameter has a `.grad`. At any time before, the parameters of at most two
        modules have one.

        A way without hooks: `forward` cuts the graph at each module. It calls each module with
        `x.detach().requires_grad_()`, and keeps the input and the output. Then you can call
        `backward` on each module's output separately; the gradient of its input is the gradient of
        the output of the module before. The caller calls `forward` once before each call of
        `backward`.
        """
        raise NotImplementedError("task 3 is not started")


class HybridModel(ShardedModel):
    """Task 4: shards inside groups of ranks, replicas across them.

    Parameters
    ----------
    modules, comm
        As for `ShardedModel`.
    shard_ranks : int
        The number of ranks of a group, for example those of a node; it divides `comm.size`. Group g
        has the `shard_ranks` ranks from g * shard_ranks on. The parameters are sharded over the
        ranks of one group, so the first ranks of all groups hold the same shard, and so on.

    `forward` and `backward` return the same as in task 3, with gradients summed over *all* ranks.
    But parameters are gathered only inside the group. Between groups, only ranks that hold the same
    shard exchange messages: one all-reduce of this shard of the gradients for each unit. (One for
    each unit, so that the first ones could run while backward goes on.) `comm.split(color)` returns
    the communicator of all ranks that give the same color, ordered by rank. A rank may call it four
    times.
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

"""Lesson 04: data parallelism, from equal shares of the batch to buckets that are reduced while
backward still runs.

    backward   ...layer 4....layer 3....layer 2....layer 1...│ finish
    stream              └ bucket 0 ┘ └── bucket 1 ──┘ └ bucket 2 ┘

Fill in every function that raises `NotImplementedError`, and `BucketedGradients.__init__`; the
docstrings are the contract. You need torch, and only two collectives of the package:

    all_reduce(tensor, comm, algorithm="ring")      every rank's tensor becomes the sum over all ranks, in place
    broadcast(tensor, comm, algorithm="tree")       every rank's tensor becomes rank 0's, in place

Both need contiguous tensors (all gradients here are contiguous). Every rank must call them with the
same sizes in the same order. Give them `parameter.detach()`, which shares the parameter's memory,
or `parameter.grad`. Models have the dtype float64 or float32, and messages have the same. (Without
`algorithm` the package chooses one, and this one may send no message; the grader counts messages.)
You are building what `minidist.full` does, so calling it scores nothing, and neither does
torch's DistributedDataParallel.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 04             points, and what is still wrong
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import minidist
from minidist import Communicator
from minidist.full.collectives import all_reduce, broadcast  # noqa: F401


def local_loss(model: nn.Module, inputs: Tensor, targets: Tensor, comm: Communicator) -> Tensor:
    """Task 1: return this rank's part of the loss of a batch; the parts of all ranks add up to the
    loss of the batch.

    Parameters
    ----------
    model
        Maps rows [b, D] to rows [b, O]. Call it once, on this rank's rows only.
    inputs, targets : Tensor
        The whole batch, the same on every rank: [B, D] and [B, O]. The loss is the squared error,
        summed over the O outputs and averaged over the B rows.

    This rank's rows are its part of `torch.tensor_split(..., comm.size)`. The parts differ by one
    row where P does not divide B, and some are empty where B < P. Return a scalar tensor on which
    `backward()` works, also if this rank has no rows: the gradients are then zero. Send nothing.
    """
    raise NotImplementedError("task 1 is not started")


def start_equal(model: nn.Module, comm: Communicator) -> None:
    """Task 2, first half: give every rank the parameters of rank 0.

    Call `broadcast(..., algorithm="tree")` once for each parameter, in the order of
    `model.parameters()`, also for parameters that need no gradient. Buffers are not parameters:
    every rank keeps its own.
    """
    raise NotImplementedError("task 2 is not started")


def sum_gradients(model: nn.Module, comm: Communicator) -> None:
    """Task 2, second half: after backward, replace every gradient by the sum of all ranks'
    gradients.

    Call `all_reduce(..., algorithm="ring")` once for each parameter, in the order of
    `model.parameters()`. Every parameter has a gradient. Reduce a gradient of zeros like any other,
    or the other ranks would wait. The local losses add up to the loss of the batch, so the sum of
    their gradients is the gradient of the batch: divide by nothing.
    """
    raise NotImplementedError("task 2 is not started")


def assign_buckets(parameters: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Task 3, first half: return the buckets, lists of parameters; the last parameter comes first.

    Backward reaches the last layer first, so go through `parameters` from the end to the beginning.
    Put each parameter into the open bucket. Close the bucket once it holds `limit` bytes or more.
    So a bucket may hold more than `limit`, but without its last parameter it holds less.
    `parameter.nbytes` is the number of bytes. No bucket is empty.
    """
    raise NotImplementedError("task 3 is not started")


class BucketedGradients:
    """Task 3, second half: sum gradients over the ranks bucket by bucket, while backward still
    runs.

    Parameters
    ----------
    model
        Its parameters are already equal on all ranks. Every backward gives each parameter a
        gradient once.
    comm, stream
        The ranks, and the stream that `comm.stream()` returned. `handle = stream.launch(work,
        *arguments)` returns at once; the stream then calls `work(*arguments)` in a thread of its
        own, one launch after the other. `handle.wait()` waits until this call has ended. (Arguments
        by name are not passed on: write `functools.partial(all_reduce, algorithm="ring")`, or a
        function of your own.) A communicator belongs to one thread: work on the stream uses
        `stream.comm`, never `comm`.
    limit : int
        The `limit` for `assign_buckets`. The buckets are those of all parameters of the model.

    Attributes
    ----------
    synchronising : bool
        True at the beginning. While it is False, gradients are added up on this rank and no bucket
        is launched.

    After `parameter.register_post_accumulate_grad_hook(function)`, autograd calls
    `function(parameter)` whenever it has put or added a gradient into `parameter.grad`. Launch a
    bucket from within the hook that completes it: flatten its gradients into one tensor (all
    parameters have one dtype), and launch one `all_reduce(flat, stream.comm, algorithm="ring")` on
    the stream.

    The ranks may finish their parameters in different orders, and must still reduce the same bucket
    at the same time. So launch bucket k only after buckets 0 to k - 1 have been launched, and then
    at once if it is complete. Wait for nothing before backward has ended; then wait once for each
    bucket.
    """

    def __init__(self, model: nn.Module, comm: Communicator, stream: Any, limit: int) -> None:
        self.synchronising = True  # and here the hooks are to be registered

    def finish(self) -> None:
        """Wait for all buckets, and copy the sums back into each `parameter.grad`; then be ready
        for the next backward.

        The caller calls this once after each backward in which `synchronising` was True. All
        buckets have then been launched.
        """
        raise NotImplementedError("task 3 is not started")


def accumulate(
    model: nn.Module,
    gradients: BucketedGradients,
    inputs: Tensor,
    targets: Tensor,
    microbatches: int,
    comm: Communicator,
) -> None:
    """Task 4: compute the gradient of the loss of a batch in several backwards, and communicate
    only in the last one.

    Parameters
    ----------
    model, inputs, targets, comm
        As in task 1, with the same loss of the same batch. All gradients are None at the call. (You
        cannot use `local_loss` here: it would split the rows of a microbatch over the ranks again,
        and divide by their number.)
    gradients
        A `BucketedGradients` as in task 3. While `gradients.synchronising` is True, every backward
        sums over the ranks the gradients that have been added up in `parameter.grad` by then.
    microbatches : int
        Cut this rank's rows into this number of microbatches, again with `torch.tensor_split`. Run
        a microbatch without rows like any other. Run backward of a microbatch before forward of the
        next one, so that the activations of only one microbatch are held at a time. Keep no list of
        what the model returned, either.

    At the end, if there was no error, call `gradients.finish()` once. After an error do not call
    it: the other ranks may never launch the buckets that it would wait for. Set
    `gradients.synchronising` to True before the function returns, and also before an error leaves
    it.
    """
    raise NotImplementedError("task 4 is not started")


def example(rank: int) -> nn.Module:
    """Return a small model in float64, another one for each rank."""
    draws = torch.Generator().manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=draws)
    return model


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    draws = torch.Generator().manual_seed(0)
    inputs, targets = (
        torch.randn(10, width, dtype=torch.float64, generator=draws) for width in (3, 2)
    )

    mine = slice(comm.rank, None, comm.size)

    def backward(model: nn.Module) -> None:
        ((model(inputs[mine]) - targets[mine]).square().sum() / len(inputs)).backward()

    def first_gradient(model: nn.Module) -> str:
        return f"the first gradient is {next(model.parameters()).grad.flatten()[0]:.6f}"

    def task_1() -> str:
        loss = local_loss(example(0), inputs, targets, comm).detach().reshape(1)
        all_reduce(loss, comm)
        return f"the local losses add up to {loss.item():.6f}"

    def task_2() -> str:
        model = example(comm.rank)
        start_equal(model, comm)
        backward(model)
        sum_gradients(model, comm)
        return first_gradient(model)

    def task_3() -> str:
        model = example(0)
        gradients = BucketedGradients(model, comm, comm.stream(), limit=64)
        backward(model)
        gradients.finish()
        return (
            f"{len(assign_buckets(list(model.parameters()), 64))} buckets, {first_gradient(model)}"
        )

    def task_4() -> str:
        model = example(0)
        accumulate(
            model, BucketedGradients(model, comm, comm.stream(), limit=64), inputs, targets, 3, comm
        )
        return first_gradient(model)

    for number, task in enumerate((task_1, task_2, task_3, task_4), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()

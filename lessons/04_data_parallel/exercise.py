"""Lesson 04: data parallelism, from a fair share of the batch to buckets that travel while backward still runs.

    backward   ...layer 4....layer 3....layer 2....layer 1...│ finish
    stream              └ bucket 0 ┘ └── bucket 1 ──┘ └ bucket 2 ┘

Fill in what raises, and `BucketedGradients.__init__`; the docstrings are the contract. You need torch, and of the
package only two collectives:

    all_reduce(tensor, comm, algorithm="ring")      every rank's tensor becomes the sum over all ranks, in place
    broadcast(tensor, comm, algorithm="tree")       every rank's tensor becomes rank 0's, in place

Both want contiguous tensors, as the gradients here are, and the same sizes, in the same order, on every rank. Hand them
`parameter.detach()`, which shares the parameter's memory, or `parameter.grad`. Models are of float64 or float32, and so
is what travels. (Without `algorithm` the package chooses one, perhaps without any
message; the grader counts messages.) `minidist.parallel` is what you are building: calling it scores nothing, and
neither does torch's DistributedDataParallel.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 04             points, and what is still wrong
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import minidist
from minidist import Communicator
from minidist.collectives import all_reduce, broadcast  # noqa: F401


def local_loss(model: nn.Module, inputs: Tensor, targets: Tensor, comm: Communicator) -> Tensor:
    """Task 1: return this rank's part of the loss of a batch; the parts of all ranks add up to the loss.

    Parameters
    ----------
    model
        Maps rows [b, D] to rows [b, O]. Call it once, on this rank's rows only.
    inputs, targets : Tensor
        The whole batch, the same on every rank: [B, D] and [B, O]. The loss is the squared error, summed over the O
        outputs and averaged over the B rows.

    This rank's rows are those that `torch.tensor_split(..., comm.size)` gives it: shares differ by a row where P does
    not divide B, and are empty where B < P. What is returned is a scalar from which `backward()` works, with no rows
    too: it then leaves gradients of zero. Nothing is sent.
    """
    raise NotImplementedError("task 1 is not started")


def start_equal(model: nn.Module, comm: Communicator) -> None:
    """Task 2, first half: give every rank the parameters of rank 0.

    One `broadcast(..., algorithm="tree")` for each parameter, in the order of `model.parameters()`, also for those that
    need no gradient. Buffers are no parameters: every rank keeps its own.
    """
    raise NotImplementedError("task 2 is not started")


def sum_gradients(model: nn.Module, comm: Communicator) -> None:
    """Task 2, second half: after backward, replace every gradient by the sum of all ranks' gradients.

    One `all_reduce(..., algorithm="ring")` for each parameter, in the order of `model.parameters()`. Every parameter
    has a gradient; one that is 0 is summed like any other, or the other ranks would wait. As local losses add up to the
    loss, the sum of their gradients is its gradient: nothing is divided.
    """
    raise NotImplementedError("task 2 is not started")


def assign_buckets(parameters: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Task 3, first half: deal parameters into buckets, last parameter first.

    Backward reaches the last layer first, so the list is walked from its end to its beginning. A parameter goes into
    the bucket that is open. A bucket is closed once it holds `limit` bytes or more, so it may hold more than `limit`,
    but not without its last parameter. (`parameter.nbytes` are its bytes.) No bucket is empty.
    """
    raise NotImplementedError("task 3 is not started")


class BucketedGradients:
    """Task 3, second half: sums gradients bucket by bucket, while backward still runs.

    Parameters
    ----------
    model
        Its parameters are equal on all ranks already. Every backward gives each of them a gradient, once.
    comm, stream
        The ranks, and what `comm.stream()` returned. `handle = stream.launch(work, *arguments)` returns at once and has
        `work(*arguments)` run beside this thread, one launch after the other; `handle.wait()` waits until it has run.
        (Arguments by name are not passed on: write `functools.partial(all_reduce, algorithm="ring")`, or a function of
        your own.) A communicator serves one thread: work on the stream uses `stream.comm`, never `comm`.
    limit : int
        Of the buckets of task 3, first half, over all parameters of the model.

    Attributes
    ----------
    synchronising : bool
        True to begin with. While it is False, gradients are added up on this rank and nothing is launched.

    `parameter.register_post_accumulate_grad_hook(function)` has autograd call `function(parameter)` whenever it has put
    or added a gradient into `parameter.grad`. Launch a bucket from within the hook that completes it, flattened into
    one tensor (all parameters have one dtype), by one `all_reduce(flat, stream.comm, algorithm="ring")` on the stream.
    The ranks may finish their parameters in different orders, and must still reduce the same bucket at the same time:
    bucket k is launched only when buckets 0 to k - 1 are, and then at once if it is complete. Wait for nothing before
    backward has ended, and then once for each bucket.
    """

    def __init__(self, model: nn.Module, comm: Communicator, stream: Any, limit: int) -> None:
        self.synchronising = True  # and here the hooks are to be registered

    def finish(self) -> None:
        """Wait for all buckets and copy each sum back into `parameter.grad`; then be ready for the next backward.

        Called once after each backward in which `synchronising` was True, so all buckets have been launched by then.
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
    """Task 4: find the gradient of the loss of a batch in several backwards, communicating in the last one only.

    Parameters
    ----------
    model, inputs, targets, comm
        As in task 1, with the same loss of the same batch. All gradients are None when this is called. (`local_loss`
        itself is of no use here: given a part, it would cut its rows again and divide by their number.)
    gradients
        What task 3 builds. Whenever autograd reaches a parameter while `gradients.synchronising` is True, the gradient
        that it has by then is summed over the ranks.
    microbatches : int
        Into so many parts this rank's rows are cut, by `torch.tensor_split` again. A part with no rows is run like any
        other. Run backward of a part before forward of the next: only one part's activations are held at a time. Keep
        no list of what the model returned, either.

    In the end, if there was no error, call `gradients.finish()`, once. After an error do not call it: the other ranks
    may never launch what it would wait for. `gradients.synchronising` is True when this returns, and also when it is
    left by an error.
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
    inputs, targets = (torch.randn(10, width, dtype=torch.float64, generator=draws) for width in (3, 2))

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
        return f"{len(assign_buckets(list(model.parameters()), 64))} buckets, {first_gradient(model)}"

    def task_4() -> str:
        model = example(0)
        accumulate(model, BucketedGradients(model, comm, comm.stream(), limit=64), inputs, targets, 3, comm)
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

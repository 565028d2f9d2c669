"""Lesson 22: sites that a slow wire joins, and gradients of weights that have changed since.

    fewer bytes       task 1: send the largest elements, and keep the others for later
    fewer meetings    task 2: train alone for H steps, then take one outer step together
    no waiting        task 3: which weights a pipeline uses that never stops, and what that allows

Fill in the functions; their docstrings are the contract. Arrays are numpy's, and you need two
collectives of the package:

    all_gather(mine, comm)            returns all ranks' arrays, one after the other, rank by rank
    all_reduce(array, comm, "mean")   every rank's array becomes the mean over all ranks, in place

You are building parts of `minidist.full`, so calling it scores nothing.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 22             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import minidist
from minidist import Communicator
from minidist.full.collectives import all_gather, all_reduce  # noqa: F401

Array = np.ndarray[Any, Any]

# ---------------------------------------------------------------- task 1: fewer bytes


def sparse_all_reduce(gradient: Array, kept: Array, count: int, comm: Communicator) -> None:
    """Task 1: sum a gradient over all ranks, but let each rank send only `count` of its elements.

    All ranks call it together, once for each step. Nothing is lost: what a rank does not send, it
    keeps, and may send it in a later step. So at any time, summed over the ranks, everything that
    was sent so far and everything that is kept now must equal the sum of all gradients so far.

    Parameters
    ----------
    gradient : array [n]
        This rank's gradient, flat. When the call returns, it holds the sum of what all ranks have
        sent in this step: the same bits on every rank. Where nobody has sent anything it is 0.
    kept : array [n]
        What this rank has not sent yet, of the same dtype. Before the first step it is all 0. When
        the call returns, it holds what this rank has not sent yet *now*. It is this rank's own:
        other ranks keep other values.
    count : int
        k, how many elements a rank sends in each step; at least 1 and at most n.

    Change both arrays in place, and return nothing. A rank sends the k elements that are largest in
    size (-3 is larger than 2) among all that it could send: the new gradient together with what it
    has kept. (No two have the same size, except that several may be 0. Then send any of these.)
    Different ranks choose different places, and several may choose the same one: then their values
    add up.

    Cost
    ----
    A rank sends (P - 1) k (4 + itemsize) bytes in a step: to each other rank k places, which are
    numbers of 4 bytes (`numpy.int32`), and k values.
    """
    raise NotImplementedError("task 1 is not started")


# ---------------------------------------------------------------- task 2: fewer meetings


class OuterStep:
    """Task 2: let each site train alone for H steps; then all sites take one outer step together.

    Each rank is a site. Its own optimizer, the inner one, is not your concern: it changes the
    parameters in place, and after each of its steps `stepped` is called.

    Parameters
    ----------
    parameters : list of arrays
        This site's parameters. Now they have the same values on all sites. You may keep the list,
        but the inner optimizer goes on changing these arrays.
    comm : Communicator
        The sites.
    every : int
        H: the sites meet after H steps, after 2 H steps, and so on.
    lr, momentum : float
        Of the outer optimizer.
    """

    def __init__(
        self, parameters: list[Array], comm: Communicator, every: int, lr: float, momentum: float
    ) -> None:
        raise NotImplementedError("task 2 is not started")

    def stepped(self) -> None:
        """Count a step of the inner optimizer. After every H of them, meet.

        When the sites meet, each site has moved to another place since all of them had the same
        parameters. For the outer optimizer the *gradient* of a parameter is the mean over the
        sites of how far each has moved, with the sign that a gradient has: an optimizer subtracts
        it. The outer optimizer starts where all sites were the same, not where this site is now. It
        is SGD with Nesterov momentum as torch has it: with a velocity that is 0 before the first
        meeting,

            velocity  <-  momentum * velocity + gradient
            parameter <-  parameter - lr * (gradient + momentum * velocity)

        Afterwards all sites have the same parameters again, and go on from there: write them into
        the arrays, in place.

        Cost
        ----
        When the sites meet, as many bytes as one all-reduce of each parameter sends. You may also
        send all parameters as one flat array: that is as many bytes in fewer messages. At any other
        time a site sends not a single byte; nor does it when an `OuterStep` is made.
        """
        raise NotImplementedError("task 2 is not started")


# ---------------------------------------------------------------- task 3: no waiting


def old_weights(row: Sequence[str], batch: int) -> tuple[list[int], int]:
    """Task 3, first half: return the d of each update, and how many copies of its weights a stage
    must hold.

    d is the age of a gradient plus one. Its age is the number of updates that were made after its
    batch has read the weights.

    Parameters
    ----------
    row : sequence of str
        What one stage of a pipeline does, in order. `F5` is the forward of microbatch 5, `B5` its
        backward, and `U` updates the weights. Microbatches count from 0. Forwards are in order, and
        so are backwards; each backward comes somewhere after its forward. Forwards of later batches
        may come before an update: the pipeline is never flushed.
    batch : int
        How many microbatches' gradients an update uses. The first batch are the microbatches 0 to
        `batch - 1`, and so on. Right after the last backward of each batch comes its `U`.

    Which weights are used
    ----------------------
    The weights before the first update are version 0, those after t updates are version t. All
    forwards of a batch use the same version: the newest that there is when the *first* forward of
    this batch runs. A backward uses the version that its forward has used.

    Returns
    -------
    delays : list of int
        For each `U` the d of the lesson's formula: update number t = 0, 1, 2, ... makes

            version t + 1 = version t - lr * (gradient at version t - d + 1)

        So d is 1 if the gradient is that of the weights which are updated.
    copies : int
        The largest number of versions that the stage must hold at the same time. It always holds
        the newest version. It holds an older one as long as a forward or a backward still comes that
        uses it, and no longer. (An update may write over a version that nobody needs any more.)
    """
    raise NotImplementedError("task 3 is not started")


def largest_rate(curvature: float, delay: int) -> float:
    """Task 3, second half: return the learning rate up to which training with old weights goes on
    well.

    The loss is the parabola c x²/2 with the curvature c > 0, so its gradient at x is c x. With the
    delay d an update is x(t + 1) = x(t) - lr c x(t - d + 1). If lr is small, x goes to 0. If it is
    large, x oscillates, and grows without limit. Return the learning rate in between, to three
    digits at least, for any delay d from 1 to 10.

    You may try it out: run the recurrence, and halve the interval in which the answer lies. Or use
    that x is a sum of terms z^t, where z is a root of the polynomial z^d - z^(d-1) + lr c, and goes
    to 0 if all roots have |z| < 1 (`numpy.roots`).
    """
    raise NotImplementedError("task 3 is not started")


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()

    def task_1() -> str:
        kept, received = np.zeros(4), []
        for _ in range(3):
            gradient = np.array([0.4, -1.0, 0.1, comm.rank + 2.0])
            sparse_all_reduce(gradient, kept, 1, comm)
            received.append(gradient.tolist())
        return f"three steps give {received}; rank 0 keeps {np.round(kept, 6).tolist()}"

    def task_2() -> str:
        weight = np.array([10.0])
        outer = OuterStep([weight], comm, every=2, lr=0.5, momentum=0.5)
        seen = []
        for _ in range(4):
            weight -= comm.rank + 1.0
            outer.stepped()
            seen.append(round(float(weight[0]), 6))
        return f"the weight is {seen} after each of four steps"

    def task_3() -> str:
        words = "F0 F1 F2 B0 U F3 B1 U F4 B2 U B3 U B4 U"
        rates = [round(largest_rate(2.0, delay), 3) for delay in (1, 2, 3)]
        return f"delays and copies {old_weights(words.split(), 1)}; learning rates {rates}"

    for number, task in enumerate((task_1, task_2, task_3), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()

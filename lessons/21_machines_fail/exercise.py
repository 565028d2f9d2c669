"""Lesson 21: a job that loses machines and goes on, with the same numbers.

    view 1     0 1 2 3        each is a member; its place here is its rank
                   ✗          member 2 is lost: task 1 says who is in the next view
    view 2     0 1 3 4        task 2: member 4, which is new, gets what the others hold
                              task 3: whatever the number of ranks, the batches stay

Fill in the functions; their docstrings are the contract. You are building parts of
`minidist.full.comm.membership`, `minidist.full.trainer` and `minidist.plan`, so calling anything in these
scores nothing.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 21             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import minidist
from minidist import Communicator

Array = np.ndarray[Any, Any]

# ---------------------------------------------------------------- task 1: who is left


class View(NamedTuple):
    """The members of a job at one time, in the order of their ranks. Views are numbered 1, 2, ..."""

    number: int
    members: tuple[int, ...]


def next_view(last: View, here: Collection[int], dead: Collection[int], ranks: int) -> View | None:
    """Task 1: return the view that follows `last`, or None if those who are here may not decide it.

    A member is a process, and its number is never used again: a process that is started in place
    of a lost one has a number of its own.

    Parameters
    ----------
    last : View
        The last view. Before the first one it is `View(0, ())`.
    here : collection of int
        The members who have come to decide the next view, in any order. Some may be newcomers.
    dead : collection of int
        The members of whom the launcher knows that their processes have ended. Whoever is dead is
        not here, even if `here` names it: it may have ended a moment ago.
    ranks : int
        How many ranks a whole view has. A view may have fewer, the first one, too.

    Who may decide
    --------------
    The *voters* are the members of the last view who are not dead. (A voter who is not here may be
    cut off from us, and alive.) A view may follow if
    - more than half of the voters are here, or
    - exactly half of the voters are here, and among them the voter with the lowest number, or
    - there are no voters.
    Newcomers have no vote. There is no view without members.

    Which view follows
    ------------------
    Its number is one more. First come the members of the last view who are here, in the order of
    their ranks there; then the newcomers, the lowest number first. After `ranks` members the view
    is full, and whoever is left waits for another one.
    """
    raise NotImplementedError("task 1 is not started")


# ---------------------------------------------------------------- task 2: what they hold


class Standing(NamedTuple):
    """What a rank holds when a view begins."""

    # how many steps have led to its arrays; -1: it is new, not ready, and its arrays hold nothing
    done: int
    # whether the sum of the gradients of the *next* step is here: then the rank can take that step
    # alone
    ready: bool


def recover(
    mine: Standing,
    take_step: Callable[[], None],
    arrays: Mapping[str, Array],
    comm: Communicator,
) -> int:
    """Task 2: give every rank what the furthest rank holds; return how many steps have led to it.

    All ranks of the new view call `recover` together. The furthest ranks are those with the largest
    `done`. When it returns, `arrays` (weights and moments) have on every rank the values that they
    have on the furthest ranks. The arrays have the same names, in the same order, the same shapes
    and dtypes on all ranks; change them in place.

    A rank that is one step behind and `ready` must call `take_step()`, once: it changes the rank's
    arrays into what they are after the next step. Then the rank has what it needs. No other rank
    may call it: if nobody has taken a step, it will be taken again by all ranks together.

    Every other rank that is behind is *needy*: a newcomer, or one that the others went on without
    for a while, so that it is not ready, or further behind. It gets all its arrays from a peer, by
    `comm.send` and `comm.recv`, in their order (they are contiguous). Its peer is a rank that has
    what it needs, perhaps by `take_step()`. So that no peer has to send to all: number the needy
    ranks 0, 1, 2, ... in the order of their ranks, and the h ranks that have it as well; needy rank
    i gets its arrays from number i mod h.

    If all ranks are new, return -1, and send nothing.

    Cost
    ----
    One message for each array of each needy rank, and no other message. The ranks may tell each
    other their standings by `comm.all_gather_object(x)`, which returns the list of every rank's x, in the
    order of the ranks; x is small plain data.
    """
    raise NotImplementedError("task 2 is not started")


# ---------------------------------------------------------------- task 3: the same batches


def microbatches(
    order: Callable[[int], Array], step: int, batch: int, largest: int, ranks: int, rank: int
) -> list[tuple[Array, float]]:
    """Task 3: return what a rank computes in a step, as (samples, weight) for each microbatch.

    Whatever the number of ranks, step k must train on the same samples, and its loss must be the
    same number: the mean over all samples of its global batch.

    Parameters
    ----------
    order : callable
        `order(epoch)` returns the order of an epoch's samples: an array of their numbers. It is the
        same on every rank. Epochs count from 0, and all have the same number of samples, that of
        `order(0)`. Ask for no other epoch than this one and the step's own.
    step : int
        Counts from 0, through all epochs.
    batch : int
        Samples of a global batch. An epoch's order is cut into global batches, one after the other.
        The last one of an epoch may be shorter: no batch has samples of two epochs, no sample is
        left out, none comes twice.
    largest : int
        The most samples that fit into a microbatch, at least 1.
    ranks, rank : int
        How many ranks there are now, and which one this is.

    Returns
    -------
    list of (samples, weight)
        A rank takes a contiguous share of the global batch, as `numpy.array_split` cuts it for
        `ranks` ranks. It cuts its share into microbatches, again as `numpy.array_split` does. Their
        number is the same on every rank, and as small as possible if no rank's microbatch may have
        more than `largest` samples. So a microbatch may be empty: ranks have to agree how often
        they come to a collective.

        The loss of a microbatch is a mean over *its* samples. `weight` is what it is multiplied by,
        so that the sum over all microbatches of all ranks is the mean over the global batch. An
        empty microbatch weighs 0.
    """
    raise NotImplementedError("task 3 is not started")


# ---------------------------------------------------------------- task 4: who is slow


def straggler(seconds: Array, rows: Sequence[int], stages: Sequence[int]) -> int | None:
    """Task 4: return the rank that is slow, or None.

    Parameters
    ----------
    seconds : array [steps, ranks], float64
        How long each rank computed in each step, above 0. Waiting for others is not in it. Do not
        change it.
    rows : sequence of int
        How many rows of the global batch each rank has. Two ranks need not have the same number; a
        rank that has none is never slow.
    stages : sequence of int
        Which stage of the pipeline each rank has. Different stages have different layers.

    How to find it
    --------------
    A rank's *pace* in a step is its seconds per row. Its *peers* are the ranks of its stage that
    have rows, itself among them. The *usual* pace is the median of the peers' paces in this step;
    of an even number of peers it is the lower one of the two in the middle. (Of two ranks the faster
    one is usual.) The rank's score in this step is its pace divided by the usual one.

    Its score over all steps is the median of its scores (here, of an even number, the mean of the
    two in the middle, as `numpy.median` has it). The rank with the largest of these is slow if its
    score is at least 1.3. Of several with the same score, the lowest rank is returned.
    """
    raise NotImplementedError("task 4 is not started")


# ---------------------------------------------------------------- task 5: what is left of the time


def goodput(mtbf: float, step: float, stall: float, out: float, replicas: int) -> float:
    """Task 5, first half: return how much is trained if others go on with fewer replicas, as a share
    of what all replicas would train in the same time without a failure.

    1 means that nothing is lost, and 0 that nothing is trained. A failure comes every
    `mtbf` seconds on average, anywhere in the job. Then
    - half a step is lost on average: `step` is the seconds of one step;
    - one of the `replicas` replicas is out for `out` seconds, while the others train. Say that
      failures are so rare that two replicas are never out together. If 1 of 4 is out for a tenth of
      the time, a fortieth of the training is missing;
    - all ranks stand still twice, each time for `stall` seconds: when the replica leaves, and when
      it is back. Failures may come in that time as well. The lesson shows what remains of the time
      if each failure stops a job once for s seconds; use that with s = 2 `stall`.

    Losses of the first two kinds are shares of the time in which the job does not stand still: they
    are taken off from 1, and what is left is multiplied by the share of the third kind. No result
    is below 0.
    """
    raise NotImplementedError("task 5 is not started")


def spares(machines: int, mtbf: float, repair: float, risk: float) -> int:
    """Task 5, second half: return how many spare machines a job needs.

    Each of the job's `machines` fails every `mtbf` seconds on average, and a lost machine is back
    after `repair` seconds. Say that `machines` machines are always at work, whether there are spares
    or not. Then the number of machines in repair has a Poisson distribution: it is n with the
    probability e^(-a) aⁿ/n!, and its mean a is the failures of the whole job in the time of one
    repair.

    A failure finds a spare if fewer machines are in repair than there are spares. Return the
    smallest number of spares with which the probability that a failure finds none is at most `risk`.
    """
    raise NotImplementedError("task 5 is not started")


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()

    def task_1() -> str:
        view = View(1, (0, 1, 2, 3))
        return (
            f"2 is dead, 4 is new: {next_view(view, {4, 3, 1, 0}, {2}, 4)}; "
            f"0 and 1 alone: {next_view(view, {0, 1}, set(), 4)}; "
            f"2 and 3 alone: {next_view(view, {2, 3}, set(), 4)}"
        )

    def task_2() -> str:
        last = comm.rank == comm.size - 1 > 0
        arrays = {"weight": np.full(3, float(comm.rank)), "mean": np.full(3, 10.0 * comm.rank)}
        standing = Standing(-1, False) if last else Standing(5, False)
        if not last:
            arrays["weight"][:], arrays["mean"][:] = 1.0, 2.0
        done = recover(standing, lambda: None, arrays, comm)
        held = comm.all_gather_object({name: array.tolist() for name, array in arrays.items()})
        return f"step {done}; the last rank has {held[-1]}"

    def task_3() -> str:
        mine = [microbatches(lambda epoch: np.arange(10), 0, 8, 2, 3, rank) for rank in range(3)]
        return "; ".join(
            f"rank {rank}: " + ", ".join(f"{rows.tolist()} x {weight:g}" for rows, weight in parts)
            for rank, parts in enumerate(mine)
        )

    def task_4() -> str:
        seconds = np.array([[1.0, 1.5, 1.1], [1.1, 1.6, 3.0], [1.0, 1.4, 1.0]])
        return f"slow is rank {straggler(seconds, (4, 4, 4), (0, 0, 0))}"

    def task_5() -> str:
        share = goodput(mtbf=10_000.0, step=10.0, stall=60.0, out=3600.0, replicas=32)
        return f"{share:.1%} trains; {spares(48, 3.6e6, 86400.0, 0.05)} spares"

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()

"""Collectives, each built from sends and receives.

    the book                        here
    ring.ring_all_gather            the same function
    ring.ring_reduce_scatter        `fast_ring.reduce_pieces`, in two temporaries and in segments
    collectives.all_reduce          `operations.all_reduce`: checks, and chooses an algorithm
    algorithm=                      `choose.TABLE`, and the rule of "auto" in `choose.explain`
    star                            `central.all_reduce`
    binomial_tree                   `tree.family`
    sum_up, send_down               `tree.reduce`, `tree.broadcast`, in blocks
    doubling_all_reduce             `recursive.all_reduce`
    halving_reduce_scatter          `recursive._halve`; `recursive.halving_doubling` gathers as well
    all_to_all                      `pairwise.all_to_all`
    hierarchical_all_reduce         `hierarchical.all_reduce`
    reduction                       `reduction.reduction`, for all dtypes
    split, cut                      `fast.cut`, `buffers.Chunks`
    -                               `shared.all_reduce`: ranks of a node read each other's memory

Read `minidist/collectives.py` first. What it has in a few lines is here once more where speed needs
it: temporaries and segments (`fast.py`), results in memory of the caller's, `prepare`. Both pass
the same tests.

    family          all_reduce  reduce_scatter  all_gather  broadcast  reduce  gather  scatter  all_to_all
    central             x                                       x         x       x       x
    ring                x             x             x
    recursive           x             x             x                                             (doubling, halving)
    tree                x                                       x         x       x       x
    pairwise                          x             x                                                 x
    hierarchical        x
    shared              x             x             x           x
    native              x             x             x           x         x       x       x           x

A family is a file of that name, the ring `fast_ring.py`; `native` is the wire's engine itself: MPI,
gloo or NCCL. Users call `operations.py`.
`explain("all_reduce", bytes, comm)` of `choose.py` says what "auto" takes and why, and `least`
counts what a rank must send. Every algorithm carries all `DTYPES` and knows all `REDUCTIONS`
(`reduction.py`). But integers have no mean, and `native` refuses a reduction that its engine cannot
compute.

What is called often, on the same memory, need not be checked and chosen each time (`prepared/`):

    handle = prepare("all_reduce", buffer, comm)     once
    handle()                                         the same bits and messages, whatever `buffer` holds

A new algorithm is a function in its family's file, and a line in `TABLE` (`choose.py`). `explain`
says when `auto` takes it, `find` which ranks cannot run it; the table above names it, and so does
the docstring of the operation.
"""

from minidist.full.collectives.choose import COLLECTIVES, algorithms, explain
from minidist.full.collectives.operations import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from minidist.full.collectives.prepared.handle import Prepared, PreparedLater, prepare
from minidist.full.collectives.reduction import REDUCTIONS
from minidist.full.comm.buffers import DTYPES

__all__ = [
    "COLLECTIVES",
    "DTYPES",
    "REDUCTIONS",
    "Prepared",
    "PreparedLater",
    "algorithms",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "explain",
    "gather",
    "prepare",
    "reduce",
    "reduce_scatter",
    "scatter",
]

# task 5: takes the mean of the ranks' outputs, whatever their shares of the denominator.
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce
from minidist.full.context.flash import attend


def attention_over_ranks(query, key, value, comm):
    output, lse = (x.contiguous() for x in attend(query, key, value, False))
    largest = lse.clone()
    all_reduce(largest, comm, op="max")
    total = (lse - largest).exp()
    all_reduce(total, comm)
    output = output / comm.size
    all_reduce(output, comm)
    return output, largest + total.log()

# task 3: thinks of the norm and forgets the bias that is added to this rank's tokens.
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def sum_partial_gradients(gradients, comm):
    all_reduce(gradients["norm.weight"], comm)

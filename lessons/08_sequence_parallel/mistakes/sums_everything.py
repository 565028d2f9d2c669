# task 3: sums all gradients, those of slices too, which are of different channels on each rank.
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def sum_partial_gradients(gradients, comm):
    for gradient in gradients.values():
        all_reduce(gradient, comm)

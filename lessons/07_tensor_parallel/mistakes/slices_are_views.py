# task 2: returns views: the slices are right, and every rank keeps the whole matrices alive.
from solution import *  # noqa: F403

from minidist.full.collectives.fast import cut


def mlp_slices(whole, rank, ranks):
    counts = cut(len(whole["up.bias"]), ranks)
    return {
        "up.weight": whole["up.weight"].split(counts)[rank],
        "up.bias": whole["up.bias"].split(counts)[rank],
        "down.weight": whole["down.weight"].split(counts, dim=1)[rank],
        "down.bias": whole["down.bias"],
    }

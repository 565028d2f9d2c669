# task 5: takes the fast links everywhere, as if all ranks were in one node.
import solution
from solution import *  # noqa: F403

from minidist import Cluster


def layouts_that_fit(ranks, cluster, **model):
    return solution.layouts_that_fit(ranks, Cluster(cluster.inside, cluster.inside), **model)

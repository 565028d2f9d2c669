# task 5: reckons with the slow links for all axes, also for groups that lie within a node.
import solution
from solution import *  # noqa: F403

from minidist import Cluster


def layouts_that_fit(ranks, cluster, **model):
    return solution.layouts_that_fit(ranks, Cluster(cluster.across, cluster.across), **model)

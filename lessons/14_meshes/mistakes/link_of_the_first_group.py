# task 5: takes the link of the group of rank 0 for that of every group along the axis.
import solution
from solution import *  # noqa: F403
from solution import Layout


class FirstGroup(Layout):
    def links(self, cluster):
        ends = {axis: self.group(axis, 0) for axis in ("dp", "pp", "tp")}
        near = {
            axis: cluster.node_of(ranks[0]) == cluster.node_of(ranks[-1])
            for axis, ranks in ends.items()
        }
        return {axis: "inside" if near[axis] else "across" for axis in ends}


def layouts_that_fit(ranks, cluster, **model):
    solution.Layout = FirstGroup
    return solution.layouts_that_fit(ranks, cluster, **model)

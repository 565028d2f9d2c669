# task 1: makes the sum of the squares of the stages' costs small; the most expensive stage may then cost more.
from solution import *  # noqa: F403


def cut_layers(costs, stages):
    best = {0: (0.0, [])}
    for stage in range(1, stages + 1):
        best = {
            stop: min(
                (best[at][0] + sum(costs[at:stop]) ** 2, [*best[at][1], (at, stop)])
                for at in best
                if at < stop
            )
            for stop in range(stage, len(costs) + 1)
        }
    return [range(*part) for part in best[len(costs)][1]]

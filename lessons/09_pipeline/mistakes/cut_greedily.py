# task 1: fills each stage up to the mean and never looks back, so the last stage gets what is left.
from solution import *  # noqa: F403


def cut_layers(costs, stages):
    mean, parts, first = sum(costs) / stages, [], 0
    for left in range(stages - 1, 0, -1):
        end = first + 1
        while end < len(costs) - left and sum(costs[first:end]) + costs[end] <= mean:
            end += 1
        parts.append(range(first, end))
        first = end
    return [*parts, range(first, len(costs))]

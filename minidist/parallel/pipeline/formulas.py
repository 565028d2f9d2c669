"""What the papers say a schedule costs: p ranks, m microbatches, v chunks a rank.

                 bubble: share of the step   ratio: to the ideal
    naive        (p - 1) / p                 p - 1
    gpipe, 1f1b  (p - 1) / (m + p - 1)       (p - 1) / m
    interleaved  (p - 1) / (v m + p - 1)     (p - 1) / (v m)
    zb-h1        idle time of a rank: (p - 1)(F + I - W), from m = p on

All assume equal stages and no latency. The tests hold the plans against them.
"""

from __future__ import annotations


def bubble_share(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """Return the idle share of the step, from 0 to 1: gpipe and 1f1b, and interleaved with its `chunks` a rank.

    (Huang et al. 2019, "GPipe", section 2.3, as O((K-1)/(M+K-1)).)
    """
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def bubble_ratio(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """Return idle time to ideal time of the same schedules. (Narayanan et al. 2021, sections 2.2.1 and 2.2.2.)"""
    return (ranks - 1) / (chunks * microbatches)


def naive_share(ranks: int) -> float:
    """Return the idle share of the step, from 0 to 1, if one rank works at a time."""
    return (ranks - 1) / ranks


def zb_h1_idle(ranks: int, microbatches: int, forward: float, input: float, weight: float) -> float:
    """Return how long each rank idles in zb-h1, in the unit of the costs. (Qi et al. 2023, section 2.3, table 2.)

    `forward`, `input` and `weight` are the times of F, I (the paper's B) and W. It holds as long as W takes no longer
    than F and no longer than I. With fewer microbatches than ranks there are only m - 1 weight gradients to fill with.
    """
    return (ranks - 1) * (forward + input) - min(ranks - 1, microbatches - 1) * weight


def activations_1f1b(ranks: int, microbatches: int, stage: int) -> int:
    """Return the most microbatches that a stage of 1f1b holds. (Narayanan et al. 2019, "PipeDream", section 3.2.)"""
    return min(ranks - stage, microbatches)

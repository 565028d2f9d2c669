"""Lesson 21, tasks 4 and 5: cases and judges of who is slow, and of what failures leave of the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, comb, exp, lgamma, log
from statistics import NormalDist, median_high, median_low
from typing import Any, NamedTuple

import numpy as np

from minidist.course.grader.contract import (
    Array,
    Arrays,
    Case,
    Note,
    Wrong,
    expect,
    expect_close,
    known,
)

# ---------------------------------------------------------------- task 4


class Paces(NamedTuple):
    """Ranks that take these seconds for a row; one may have bad steps, which take `worse` times as
    long.
    """

    label: str
    each: Sequence[float]
    rows: Sequence[int]
    stages: Sequence[int] = ()
    bad: int = -1
    bad_steps: Sequence[int] = (1, 3)
    worse: float = 4.0
    lengths: Sequence[float] = (1, 1, 1, 1, 1)  # of the steps
    noise: float = 0.01


def paces(rng: np.random.Generator, *shape: Any) -> Case:
    """Ask who is slow."""
    asked = Paces(*shape)
    rows, lengths = np.array(asked.rows), np.array(asked.lengths)[:, None]
    # a power of two, so that 1.3 times as long is just that
    seconds = rng.choice((0.5, 1.0, 2.0)) * np.array(asked.each) * np.maximum(rows, 0.25) * lengths
    seconds = seconds * rng.uniform(1 - asked.noise, 1 + asked.noise, seconds.shape)
    if asked.bad >= 0:
        seconds[list(asked.bad_steps), asked.bad] *= asked.worse
    given = {"seconds": seconds, "rows": rows, "stages": np.array(asked.stages or [0] * len(rows))}
    return Case((given,), asked.label)


SLOW = 1.3
Usual = Callable[[list[float]], float]
USUAL: dict[str, Usual] = {
    "median": lambda paces: float(np.median(paces)),
    "higher median": median_high,
    "mean": lambda paces: float(np.mean(paces)),
    "fastest": min,
}
OWN: dict[str, Callable[[Array], float]] = {  # of a rank's own paces, one a step
    "own median": lambda paces: float(np.median(paces)),
    "own mean": lambda paces: float(np.mean(paces)),
    "own first": lambda paces: float(paces[0]),
    "own fastest": lambda paces: float(paces.min()),
}
OVER_STEPS: dict[str, Callable[[list[float]], float]] = {
    "last step": lambda scores: scores[-1],
    "first step": lambda scores: scores[0],
    "worst step": max,
    "best step": min,
    "mean of steps": lambda scores: float(np.mean(scores)),
    "lower median of steps": median_low,
    "higher median of steps": median_high,
}


def slowest(seconds: Array, rows: Sequence[int], stages: Sequence[int], how: str = "") -> int:
    """Return the rank that is slow, or -1; `how` is one of `SLIPS`."""
    ranks = range(len(rows))
    if how == "paces first":
        seconds = np.median(seconds, axis=0, keepdims=True)
    counted = np.ones(len(rows)) if how == "not by rows" else np.maximum(1, np.array(rows))
    paces = seconds * counted if how == "times rows" else seconds / counted
    if how == "by total":
        paces = np.sum(seconds, axis=0, keepdims=True) / counted
    scores = np.ones(paces.shape)
    for step, each in enumerate(paces):
        if how == "idle ones are quick":
            each = np.where(np.array(rows) > 0, each, 0.0)
        compared = np.median(paces, axis=0) if how == "usual of all steps" else each
        for rank in ranks:
            peers = [
                float(compared[other])
                for other in ranks
                if (stages[other] == stages[rank] or how == "all stages")
                and (rows[other] or how in ("idle ones count", "idle ones are quick"))
                and (other != rank or how != "without itself")
            ]
            if peers and (rows[rank] or how == "idle ones count"):
                usual = USUAL.get(how, median_low)(peers)
                if how in OWN:
                    usual = OWN[how](paces[:, rank])
                if how == "own before":
                    usual = float(paces[max(0, step - 1), rank])
                scores[step, rank] = each[rank] / usual if usual else np.inf
                if how == "difference":
                    scores[step, rank] = each[rank] - usual
    lasting = [OVER_STEPS.get(how, np.median)(column.tolist()) for column in scores.T]
    worst = int(np.argmax(lasting))
    if how == "last of equals":
        worst = len(lasting) - 1 - int(np.argmax(lasting[::-1]))
    if how == "first slow":
        worst = next((rank for rank in ranks if lasting[rank] >= SLOW), 0)
    if how == "longest":
        worst = int(np.argmax(np.median(seconds, axis=0)))
    limit = {"never": np.inf, "above 1": 1.0, "above 1.5": 1.5, "above 2": 2.0, "always": 0.0}.get(
        how, SLOW
    )
    if how == "every step" and scores[:, worst].min() < SLOW:
        return -1
    named = lasting[worst] > limit if how in ("above", "above 1") else lasting[worst] >= limit
    return worst if named else -1


SLIPS = {
    "above": "only a score above 1.3 is slow; 1.3 is enough",
    "not by rows": "seconds are compared, not seconds per row",
    "times rows": "seconds are multiplied by the rows; a pace is seconds per row",
    "all stages": "a rank is compared with those of other stages, which have other layers",
    "median": "the usual pace is the mean of the two in the middle: of two ranks nobody is then "
    "1.3 times as slow",
    "higher median": "the usual pace is the higher one of the two in the middle",
    "mean": "the usual pace is the mean, which a slow rank pulls up",
    "fastest": "the usual pace is the fastest rank's, so one that is quick makes others slow",
    "own median": "a rank is compared with its own median over the steps, not with its peers",
    "own mean": "a rank is compared with its own mean over the steps, not with its peers",
    "own first": "a rank is compared with its own first step, not with its peers",
    "own fastest": "a rank is compared with its own fastest step, not with its peers",
    "own before": "a rank is compared with its own step before, not with its peers",
    "without itself": "a rank is not among its own peers",
    "idle ones count": "ranks without rows are taken for peers, or can be slow",
    "idle ones are quick": "ranks without rows are peers with a pace of 0",
    "last step": "only the last step counts",
    "first step": "only the first step counts",
    "worst step": "one bad step makes a rank slow: it has to last",
    "best step": "one good step makes a rank fit",
    "mean of steps": "scores are averaged, so that one bad step decides",
    "lower median of steps": "the lower one of the two steps in the middle counts, not their mean",
    "by total": "the steps' seconds are added up before they are compared, so one bad step decides",
    "higher median of steps": "the higher one of the two steps in the middle counts, not their mean",
    "every step": "a rank has to be slow in every step",
    "paces first": "the median is taken over paces before they are compared: steps differ in length",
    "usual of all steps": "the usual pace is that of all steps, not of this one: steps differ in length",
    "difference": "a score is a difference of paces, not their ratio",
    "last of equals": "of several with the same score the last one is returned, not the lowest",
    "first slow": "the first rank that is slow is returned, not the slowest",
    "longest": "the rank that computes longest is returned, also if it has more rows or other layers",
    "above 1": "whoever is above its usual pace is slow",
    "above 1.5": "1.5 times is the limit, not 1.3",
    "above 2": "2 times is the limit, not 1.3",
    "always": "somebody is always slow",
    "never": "nobody is ever slow, as if a rank were compared with itself",
}


def judge_straggler(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Compare the rank that is named, and with whom known mistakes name."""
    given, found = case.given[0], int(results[0]["found"])
    seconds, rows, stages = given["seconds"], given["rows"].tolist(), given["stages"].tolist()
    expected = slowest(seconds, rows, stages)
    wrongly = {
        clause: partial(slowest, seconds, rows, stages, how) for how, clause in SLIPS.items()
    }
    says = (
        f"{case.label}: {named(found)} is slow, expected {named(expected)}; rows {rows}, stages "
        f"{stages}, median seconds {np.round(np.median(seconds, axis=0), 3).tolist()}"
    )
    expect(found == expected, says, wrongly, found.__eq__)


def named(rank: int) -> str:
    """Return a rank, or nobody, in words."""
    return f"rank {rank}" if rank >= 0 else "nobody"


# ---------------------------------------------------------------- task 5


def left(
    mtbf: float, step: float, stall: float, out: float, replicas: float, how: str = ""
) -> float:
    """Return the share of the time that trains; `how` is one of `LOSSES`."""
    redone = {
        "a whole step": step / mtbf,
        "no step": 0.0,
        "half a step of all": step / 2 / replicas / mtbf,
        "half a step stops, too": 0.0,
        "exponent of all": 0.0,
    }.get(how, step / 2 / mtbf)
    missing = {
        "all replicas": out / mtbf,
        "nobody is missing": 0.0,
        "exponent of all": 0.0,
        "others are missing": out * (replicas - 1) / mtbf,
        "of the others": out / mtbf / (replicas - 1),
        "out of both": out / (mtbf + out) / replicas,
        "stalls are out": (out + 2 * stall) / mtbf / replicas,
    }.get(how, out / mtbf / replicas)
    stops = {"one stall": stall, "no stall": 0.0, "stall and out": 2 * stall + out}.get(
        how, 2 * stall
    )
    standing = {
        "first order": 1 - stops / mtbf,
        "over": 1 / (1 + stops / mtbf),
        "whole": 1 - exp(-stops / mtbf),
        "other sign": exp(min(700.0, stops / mtbf)),
        "upside down": exp(-mtbf / stops) if stops else 1.0,
        "each once": 2 * exp(-stall / mtbf) - 1,
        "mean of both": exp(-stall / mtbf),
        "half a step stops, too": exp(-(stops + step / 2) / mtbf),
        "exponent of all": exp(-(stops + step / 2 + out / replicas) / mtbf),
    }.get(how, exp(-stops / mtbf))
    going = 1 - redone - missing
    if how == "missing clamped":
        going = 1 - redone - min(1.0 / replicas, missing)
    if how == "products":
        going = (1 - redone) * (1 - missing)
    result = going - (1 - standing) if how == "subtracted" else going * standing
    if how in ("negative", "without its sign"):
        return result if how == "negative" else abs(result)
    result = max(0.0, result)
    return {"lost": 1 - result, "percent": 100 * result, "rounded": round(result, 3)}.get(
        how, result
    )


LOSSES = {
    "a whole step": "a whole step is lost, not half of one on average",
    "no step": "no step is lost",
    "half a step of all": "only one replica's half step is lost: the others take it again with it",
    "all replicas": "nobody trains while a replica is out: only 1 of the replicas is missing",
    "nobody is missing": "nothing is missing while a replica is out",
    "others are missing": "it is the others that are missing while a replica is out",
    "of the others": "the missing replica is taken for one of the others, 1 of replicas - 1",
    "out of both": "a replica is out for out / (mtbf + out) of the time; it is out / mtbf",
    "stalls are out": "the two stalls belong to the time in which a replica is out",
    "one stall": "all stand still once; they do again when the replica is back",
    "no stall": "nobody stands still",
    "stall and out": "all stand still while a replica is out",
    "first order": "standing still costs its seconds over the time between failures; with failures "
    "in that time it is more",
    "over": "standing still is counted without the failures in that time",
    "whole": "the share that stands still is taken for the one that does not",
    "other sign": "the exponent has the other sign",
    "upside down": "the exponent is upside down",
    "each once": "the two stalls are taken off one by one; together they are one of twice the seconds",
    "missing clamped": "at most one replica is missing: more are, if it is out longer than mtbf",
    "mean of both": "the shares of the two stalls are averaged; both cost",
    "half a step stops, too": "half a step is added to the seconds that stop all; it is a share that is "
    "taken off from 1",
    "exponent of all": "all losses are in the exponent: only standing still is; the others are shares that "
    "are taken off from 1",
    "products": "two losses are multiplied; both are taken off from 1",
    "subtracted": "standing still is taken off, too: it multiplies what is left",
    "lost": "the share that is lost is returned",
    "percent": "it is a percentage, not a share",
    "rounded": "it is rounded",
    "negative": "the result is below 0",
    "without its sign": "a result below 0 loses its sign; it is 0",
}


def judge_goodput(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Compare shares with the closed form."""
    asked, found = case.given[0]["asked"].tolist(), results[0]["found"]
    expected = np.array([left(*each) for each in asked])
    wrongly = {
        clause: np.array([left(*each, how) for each in asked]) for how, clause in LOSSES.items()
    }
    off = np.flatnonzero(~np.isclose(found, expected, rtol=1e-9, atol=1e-12))
    mtbf, step, stall, out, replicas = asked[off[0]] if off.size else asked[0]
    question = (
        f"mtbf={mtbf:.6g}, step={step:.6g}, stall={stall:.6g}, out={out:.6g}, {replicas:g} replicas"
    )
    expect_close(0, f"goodput({question}) of job", found, expected, instead=wrongly)


MOST = 1000  # spares that are looked at


def chance(count: int, mean: float, machines: float, how: str) -> float:
    """Return the probability that so many machines are in repair."""
    if how == "binomial":
        p = min(1.0, mean / machines)
        return comb(int(machines), count) * p**count * (1 - p) ** max(0.0, machines - count)
    if how == "not none" and count == 0:
        return 0.0
    return exp(count * log(mean) - mean - lgamma(count + 1))


def needed(machines: float, mtbf: float, repair: float, risk: float, how: str = "") -> int:
    """Return how many spares a job needs; `how` is one of `COUNTS`."""
    mean = {
        "of one": repair / mtbf,
        "upside down": machines * mtbf / repair,
        "of both": machines * repair / (mtbf + repair),
    }.get(how, machines * repair / mtbf)
    if how == "normal":
        return max(0, ceil(NormalDist(mean, mean**0.5).inv_cdf(1 - risk))) if 0 < risk < 1 else 0
    if how in ("mean", "rounded mean", "mean, rounded down"):
        return {"mean": ceil, "rounded mean": round, "mean, rounded down": int}[how](mean)
    risk = {"risk for surety": 1 - risk, "percent": risk / 100}.get(how, risk)
    count, fewer = 0, 0.0
    while count < MOST:
        none = 1 - fewer
        if how == "one term" and count > mean:
            none = chance(count, mean, machines, how)
        if how == "spares fail, too":
            more = mean * (machines + count) / machines
            none = 1 - sum(chance(n, more, machines, how) for n in range(count))
        if none < risk or (none == risk and how != "below the risk"):
            break
        fewer += chance(count, mean, machines, how)
        count += 1
    count = max(0, count + {"up to": -1, "one more": 1}.get(how, 0))
    return max(1, count) if how == "at least one" else count


COUNTS = {
    "of one": "one machine's failures are counted, not the whole job's",
    "upside down": "the mean is upside down: it is machines * repair / mtbf",
    "of both": "a machine is in repair for repair / (mtbf + repair) of the time; it is repair / mtbf",
    "risk for surety": "`risk` is taken for the probability that there is a spare",
    "percent": "`risk` is taken for a percentage",
    "below the risk": "the probability has to be below `risk`; at most `risk` is enough",
    "at least one": "one spare is kept where none is needed",
    "up to": "a failure is taken to find a spare if as many machines are in repair as there are "
    "spares",
    "one more": "the lost machine itself is counted as one in repair",
    "not none": "the probability that no machine is in repair is left out",
    "binomial": "the distribution is binomial, not Poisson's: lost machines are replaced, and fail again",
    "spares fail, too": "spare machines are counted among those that fail",
    "normal": "Poisson's distribution is taken for a normal one, mean + z times the root of the mean",
    "mean": "the mean is taken: many more failures then find no spare",
    "mean, rounded down": "the mean is rounded down: many more failures then find no spare",
    "rounded mean": "the mean is rounded: many more failures then find no spare",
    "one term": "one number of machines is held against the risk, not the sum of all larger ones",
}


def judge_spares(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Compare numbers of spares; the first that is wrong is told."""
    asked, found = case.given[0]["asked"].tolist(), results[0]["found"].tolist()
    wrongly = {clause: [needed(*each, how) for each in asked] for how, clause in COUNTS.items()}
    for question, value in zip(asked, found, strict=True):
        right = needed(*question)
        if value != right:
            machines, mtbf, repair, risk = question
            ways = {clause: each for clause, each in wrongly.items() if each == found}
            raise Wrong(
                f"{machines:.0f} machines, mtbf {mtbf:.6g} s, repair {repair:.6g} s, risk {risk:g}: "
                f"{value:g} spares, expected {right}" + known(ways, lambda _: True)
            )

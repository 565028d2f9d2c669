"""Lesson 21, tasks 4 and 5: the judges of who is slow, and of what failures leave of the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp
from statistics import median_high, median_low

import numpy as np

from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, expect_close, known

# ---------------------------------------------------------------- task 4

SLOW = 1.3
Usual = Callable[[list[float]], float]
USUAL: dict[str, Usual] = {
    "median": lambda paces: float(np.median(paces)),
    "higher median": median_high,
    "mean": lambda paces: float(np.mean(paces)),
    "fastest": min,
}
OVER_STEPS: dict[str, Callable[[list[float]], float]] = {
    "last step": lambda scores: scores[-1],
    "first step": lambda scores: scores[0],
    "worst step": max,
    "best step": min,
    "mean of steps": lambda scores: float(np.mean(scores)),
    "lower median of steps": median_low,
}


def slowest(seconds: Array, rows: Sequence[int], stages: Sequence[int], how: str = "") -> int:
    """Return the rank that is slow, or -1; `how` is one of `SLIPS`."""
    ranks = range(len(rows))
    counted = np.ones(len(rows)) if how == "not by rows" else np.maximum(1, np.array(rows))
    paces = seconds * counted if how == "times rows" else seconds / counted
    if how == "by total":
        paces = np.sum(seconds, axis=0, keepdims=True) / counted
    scores = np.ones(paces.shape)
    for step, each in enumerate(paces):
        for rank in ranks:
            peers = [
                float(each[other])
                for other in ranks
                if (stages[other] == stages[rank] or how == "all stages")
                and (rows[other] or how == "idle ones count")
                and (other != rank or how != "without itself")
            ]
            if peers and (rows[rank] or how == "idle ones count"):
                usual = USUAL.get(how, median_low)(peers)
                scores[step, rank] = each[rank] / usual if usual else np.inf
                if how == "difference":
                    scores[step, rank] = each[rank] - usual
    lasting = [OVER_STEPS.get(how, np.median)(column.tolist()) for column in scores.T]
    worst = int(np.argmax(lasting))
    if how == "first slow":
        worst = next((rank for rank in ranks if lasting[rank] >= SLOW), 0)
    if how == "longest":
        worst = int(np.argmax(np.median(seconds, axis=0)))
    limit = {"above 1": 1.0, "above 1.5": 1.5, "above 2": 2.0, "always": 0.0}.get(how, SLOW)
    named = lasting[worst] > limit if how in ("above", "above 1") else lasting[worst] >= limit
    return worst if named else -1


SLIPS = {
    "not by rows": "seconds are compared, not seconds per row",
    "times rows": "seconds are multiplied by the rows; a pace is seconds per row",
    "all stages": "a rank is compared with those of other stages, which have other layers",
    "median": "the usual pace is the mean of the two in the middle: of two ranks nobody is then "
    "1.3 times as slow",
    "higher median": "the usual pace is the higher one of the two in the middle",
    "mean": "the usual pace is the mean, which a slow rank pulls up",
    "fastest": "the usual pace is the fastest rank's, so one that is quick makes others slow",
    "without itself": "a rank is not among its own peers",
    "idle ones count": "ranks without rows are taken for peers, or can be slow",
    "last step": "only the last step counts",
    "first step": "only the first step counts",
    "worst step": "one bad step makes a rank slow: it has to last",
    "best step": "one good step makes a rank fit",
    "mean of steps": "scores are averaged, so that one bad step decides",
    "lower median of steps": "the lower one of the two steps in the middle counts, not their mean",
    "by total": "the steps' seconds are added up before they are compared, so one bad step decides",
    "difference": "a score is a difference of paces, not their ratio",
    "first slow": "the first rank that is slow is returned, not the slowest",
    "longest": "the rank that computes longest is returned, also if it has more rows or other layers",
    "above 1": "whoever is above its usual pace is slow",
    "above 1.5": "1.5 times is the limit, not 1.3",
    "above 2": "2 times is the limit, not 1.3",
    "always": "somebody is always slow",
}


def judge_straggler(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Compare the rank that is named, and with whom known mistakes name."""
    given, found = case.given[0], int(results[0]["found"])
    seconds, rows, stages = given["seconds"], given["rows"].tolist(), given["stages"].tolist()
    expected = slowest(seconds, rows, stages)
    if found == expected:
        return
    wrongly = {clause: slowest(seconds, rows, stages, how) for how, clause in SLIPS.items()}
    raise Wrong(
        f"{case.label}: {named(found)} is slow, expected {named(expected)}; rows {rows}, stages "
        f"{stages}, median seconds {np.round(np.median(seconds, axis=0), 3).tolist()}"
        + known(wrongly, lambda value: value == found)
    )


def named(rank: int) -> str:
    """Return a rank, or nobody, in words."""
    return f"rank {rank}" if rank >= 0 else "nobody"


# ---------------------------------------------------------------- task 5


def left(
    mtbf: float, step: float, stall: float, out: float, replicas: float, how: str = ""
) -> float:
    """Return the share of the time that trains; `how` is one of `LOSSES`."""
    redone = {"a whole step": step, "no step": 0.0, "half a step of all": step / 2 / replicas}.get(
        how, step / 2
    )
    share = {"all replicas": 1.0, "nobody is missing": 0.0, "others are missing": replicas - 1}
    missing = out * share.get(how, 1.0) / (1.0 if how == "others are missing" else replicas)
    missing = out if how == "all replicas" else missing
    stops = {"one stall": stall, "no stall": 0.0, "stall and out": 2 * stall + out}.get(
        how, 2 * stall
    )
    going = 1 - redone / mtbf - missing / mtbf
    if how == "products":
        going = (1 - redone / mtbf) * (1 - missing / mtbf)
    standing = {
        "first order": 1 - stops / mtbf,
        "over": 1 / (1 + stops / mtbf),
        "whole": (1 - exp(-stops / mtbf)),
        "other sign": exp(min(700.0, stops / mtbf)),
        "each once": 2 * exp(-stall / mtbf) - 1,
    }.get(how, exp(-stops / mtbf))
    if how == "subtracted":
        return max(0.0, going - (1 - standing))
    if how == "taken off what is left":
        return max(0.0, standing - (1 - going))
    result = going * standing
    if how == "lost":
        return 1 - max(0.0, result)
    if how == "percent":
        return 100 * max(0.0, result)
    return result if how == "negative" else max(0.0, result)


LOSSES = {
    "a whole step": "a whole step is lost, not half of one on average",
    "no step": "no step is lost",
    "half a step of all": "only one replica's half step is lost: the others take it again with it",
    "all replicas": "nobody trains while a replica is out: only 1 of the replicas is missing",
    "nobody is missing": "nothing is missing while a replica is out",
    "others are missing": "it is the others that are missing while a replica is out",
    "one stall": "all stand still once; they do again when the replica is back",
    "no stall": "nobody stands still",
    "stall and out": "all stand still while a replica is out",
    "first order": "standing still costs its seconds over the time between failures; with failures "
    "in that time it is more",
    "over": "standing still is counted without the failures in that time",
    "whole": "the share that stands still is taken for the one that does not",
    "other sign": "the exponent has the other sign",
    "each once": "the two stalls are taken off one by one; together they are one of twice the seconds",
    "products": "two losses are multiplied; both are taken off from 1",
    "subtracted": "standing still is taken off, too: it multiplies what is left",
    "lost": "the share that is lost is returned",
    "percent": "it is a percentage, not a share",
    "negative": "the result is below 0",
}


def judge_goodput(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Compare shares with the closed form."""
    asked = case.given[0]["asked"].tolist()
    expected = np.array([left(*each) for each in asked])
    wrongly = {
        clause: np.array([left(*each, how) for each in asked]) for how, clause in LOSSES.items()
    }
    expect_close(0, "goodput of question", results[0]["found"], expected, instead=wrongly)


def needed(machines: float, mtbf: float, repair: float, risk: float, how: str = "") -> int:
    """Return how many spares a job needs; `how` is one of `COUNTS`."""
    mean = machines * repair / mtbf
    mean = {"of one": repair / mtbf, "upside down": machines * mtbf / repair}.get(how, mean)
    mean = min(mean, 500.0)
    term, below, count = exp(-mean), 0.0, 0
    limit = 1 - risk if how == "risk for surety" else risk
    while 1 - below > limit and count < 1000:
        below += term
        count += 1
        term *= mean / count
        if how == "one term" and term <= risk and count > mean:
            return count
    later = {"up to": -1, "one more": 1}.get(how, 0)
    if how == "mean":
        return int(np.ceil(mean))
    if how == "rounded mean":
        return round(mean)
    return count + later


COUNTS = {
    "of one": "one machine's failures are counted, not the whole job's",
    "upside down": "the mean is upside down: it is machines * repair / mtbf",
    "risk for surety": "`risk` is taken for the probability that there is a spare",
    "up to": "a failure is taken to find a spare if as many machines are in repair as there are "
    "spares",
    "one more": "the lost machine itself is counted as one in repair",
    "mean": "the mean is taken: about half of the failures then find no spare",
    "rounded mean": "the mean is rounded: about half of the failures then find no spare",
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

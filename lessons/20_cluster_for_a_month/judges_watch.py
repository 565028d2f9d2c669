"""Lesson 20, tasks 4 and 5: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from judges import Layout, Model, layout_of, model_of, own, same

from minidist import Communicator
from minidist.course.grader.contract import Arrays, Case, Note, Wrong, known

REMEDIES = ("nothing", "microbatches", "chunks", "zero bubble", "stages or links")
FAILURES = ("dead node", "torn checkpoint", "hang", "slow rank", "bad loss", "late end")
PERCENT, FAR = 15, 1.5


class Plan(NamedTuple):
    """As in the exercise."""

    gpus: int
    hours: float
    rented: float
    gpu_mtbf: float
    every: float
    kept: int
    shared: bool
    restart: float
    limit: bool
    by_rank: bool
    noticed: float

    def words(self) -> str:
        """Return how an exercise writes it, rounded."""
        values = {
            name: value if isinstance(value, int) else f"{value:.6g}"
            for name, value in self._asdict().items()
        }
        return f"Plan({', '.join(f'{name}={value}' for name, value in values.items())})"


def plan_of(row: Sequence[float]) -> Plan:
    """Return a plan from its row."""
    gpus, hours, rented, mtbf, every, kept, shared, restart, limit, by_rank, noticed = row
    return Plan(
        int(gpus),
        hours,
        rented,
        mtbf,
        every,
        int(kept),
        bool(shared),
        restart,
        bool(limit),
        bool(by_rank),
        noticed,
    )


# ---------------------------------------------------------------- the programs


def run_diagnose(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run `diagnose` for every layout and what was measured there."""
    model, rows = own(exercise, model_of(given)), []
    for row, (batch, seconds, idle) in zip(
        given["layouts"].tolist(), given["measured"].tolist(), strict=True
    ):
        found = exercise.Diagnosis(
            *exercise.diagnose(model, own(exercise, layout_of(row)), int(batch), seconds, idle)
        )
        if found.remedy not in REMEDIES:
            raise Wrong(f"diagnose names the remedy {found.remedy!r}, expected one of REMEDIES")
        rows.append(
            [
                float(found.measured),
                float(found.formula),
                REMEDIES.index(found.remedy),
                int(found.to),
            ]
        )
    return {"diagnoses": rows}


def run_undefended(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run `undefended` for every plan; mark each failure that is named."""
    rows = []
    for row in given["plans"].tolist():
        found = set(exercise.undefended(exercise.Plan(*plan_of(row))))
        if found - set(FAILURES):
            raise Wrong(
                f"undefended names {sorted(map(str, found - set(FAILURES)))}, expected only names "
                "of FAILURES"
            )
        rows.append([name in found for name in FAILURES])
    return {"undefended": rows}


# ---------------------------------------------------------------- the judges


def judge_diagnose(
    case: Case, results: Sequence[Arrays], notes: Sequence[Note], shares: bool = False
) -> None:
    """Compare the shares alone, or the remedies as well."""
    given = case.given[0]
    model, answers = model_of(given), results[0]["diagnoses"].tolist()
    questions = [
        (layout_of(row), int(batch), seconds, idle)
        for row, (batch, seconds, idle) in zip(
            given["layouts"].tolist(), given["measured"].tolist(), strict=True
        )
    ]
    rights = [diagnosis(model, *question) for question in questions]
    for (layout, batch, seconds, idle), found, expected in zip(
        questions, answers, rights, strict=True
    ):
        asked = f"{layout.words()} with a batch of {batch}, {idle:.4g} of {seconds:.4g} s idle"
        for i, name in enumerate(("measured", "formula")):
            if not same(found[i], expected[i]):
                wrongly = {
                    clause: diagnosis(model, layout, batch, seconds, idle, how)[i]
                    for how, clause in SLIPS.items()
                }
                wrongly |= {"it is in percent; a share is at most 1": 100 * expected[i]}
                hint = known(wrongly, lambda value: same(found[i], value))  # noqa: B023
                if found[i] and not hint and rounded(answers, rights, i):
                    hint = ": it is rounded, and is wanted as it is"
                raise Wrong(f"{asked}: {name} is {found[i]:.4%}, expected {expected[i]:.4%}{hint}")
        if not shares and found[2:] != [*expected[2:]]:
            is_it, should = (
                f"{REMEDIES[int(code)]!r}{f' to {to:.0f}' if to else ''}"
                for code, to in (found[2:], expected[2:])
            )
            says = (
                f"{asked}: measured {expected[0]:.1%}, formula {expected[1]:.1%}; the remedy is "
                f"{is_it}, expected"
            )
            raise Wrong(f"{says} {should}: {advice(model, layout, batch, expected, found)}")


def rounded(answers: Sequence[Sequence[float]], rights: Sequence[Sequence[float]], i: int) -> bool:
    """Tell whether all of one share are rounded: one alone may come out so by chance."""
    pairs = [(found[i], right[i]) for found, right in zip(answers, rights, strict=True)]
    return any(
        all(same(found, round(right, digits)) for found, right in pairs) for digits in (1, 2, 3, 4)
    )


def advice(
    model: Model, layout: Layout, batch: int, expected: Sequence[float], found: Sequence[float]
) -> str:
    """Say what speaks against a remedy."""
    right, named, to = REMEDIES[int(expected[2])], REMEDIES[int(found[2])], int(found[3])
    p, v, part = layout.pp, layout.chunks, batch // layout.dp
    m = part // layout.microbatch
    if named == right and right not in ("microbatches", "chunks"):
        return "it is the right remedy, but `to` is 0 for it"
    if named == "nothing":
        return "more than 15 % of the step were measured"
    if right == "nothing":
        return "a bubble of 15 % or less is not warned of"
    if right == "stages or links" and expected[1] <= PERCENT / 100:
        return (
            "15 % or less are of the schedule, so no other schedule helps: a stage or a link is "
            "slow"
        )
    if right == "stages or links":
        return (
            "the schedule does not explain what was measured, so no other schedule helps: a stage "
            "or a link is slow"
        )
    if named == "microbatches" and to > part:
        return f"a replica has no more than {part} sequences: divide the batch by dp first"
    if named == "microbatches" and (to < 1 or part % to):
        return f"its part of the batch, {part} sequences, is not cut into {to} equal microbatches"
    if named != "microbatches" and right == "microbatches" and named != "stages or links":
        return "more microbatches are enough, and come first"
    if named == "chunks" and (to < 1 or model.layers % (p * to)):
        return f"{p} stages of {to} parts do not deal out {model.layers} layers equally"
    if named in ("microbatches", "chunks"):
        k, u = (to, v) if named == "microbatches" else (m, to)
        left, now = (p - 1) / (u * k + p - 1), m if named == "microbatches" else v
        if named == right and int(expected[3]) in (to * now, to + now):
            return (
                f"`to` is how many {right} there are then, not how many more or how many times as "
                "many"
            )
        return f"the formula is then {left:.1%}, " + (
            "and a smaller number will do" if left <= 0.15 else "still too much"
        )
    if named == "stages or links":
        return (
            "the formula explains what was measured: the schedule is at fault, not a stage or a "
            "link"
        )
    return "more chunks make the formula small enough, and come first"


def judge_undefended(
    case: Case, results: Sequence[Arrays], notes: Sequence[Note], about: Sequence[str] = FAILURES
) -> None:
    """Compare some of the failures, over all plans."""
    plans = [plan_of(row) for row in case.given[0]["plans"].tolist()]
    answers = [dict(zip(FAILURES, row, strict=True)) for row in results[0]["undefended"].tolist()]
    for name in about:
        found = [bool(each[name]) for each in answers]
        expected = [missing(plan)[name] for plan in plans]
        for plan, mine, right in zip(plans, found, expected, strict=True):
            if mine != right:
                wrongly = {
                    clause: [missing(each, how)[name] for each in plans]
                    for how, clause in LOOKS.items()
                }
                verb = "is not" if right else "is"
                says = f"{plan.words()} {verb} defended against {name!r}, but undefended "
                says += "leaves it out" if right else "names it"
                raise Wrong(says + known(wrongly, found.__eq__))


# ---------------------------------------------------------------- the rules, and known mistakes


def diagnosis(
    model: Model, layout: Layout, batch: int, seconds: float, idle: float, how: str = ""
) -> tuple[float, float, int, int]:
    """Return the shares, the number of the remedy, and to how many; `how` is one of `SLIPS`."""
    p, v, part = layout.pp, layout.chunks, batch // layout.dp
    part = batch if how == "dp" else part
    m = part if how == "sequences" else part // layout.microbatch
    measured = idle / (seconds - idle) if how == "idle of ideal" else idle / seconds

    def formula(m: int, v: int) -> float:
        v = 1 if how == "no chunks" else v
        idle = p - 1 if how != "p" else p
        whole = {
            "of ideal": v * m,
            "v of all": v * (m + p - 1),
            "m - 1": v * (m - 1) + p - 1,
            "m - 1 of ideal": v * (m - 1),
        }.get(how, v * m + p - 1)
        return idle / max(1, whole)

    def short(m: int, v: int) -> bool:
        return 100 * (p - 1) <= PERCENT * (v * m + p - 1)

    remedy, to = "zero bubble", 0
    more = [k for k in range(m + 1, part + 1) if part % k == 0 and short(k, v)]
    finer = [
        k for k in range(v + 1, model.layers + 1) if model.layers % (p * k) == 0 and short(m, k)
    ]
    if measured <= PERCENT / 100:
        remedy = "nothing"
    elif short(m, v) or measured > FAR * formula(m, v):
        remedy = "stages or links"
    elif more or finer:
        remedy, to = ("microbatches", more[0]) if more else ("chunks", finer[0])
    return measured, formula(m, v), REMEDIES.index(remedy), to


SLIPS = {
    "of ideal": "it is the share of the ideal time, (p - 1)/(v m); of the whole step it is (p - 1)/(v m + p - "
    "1)",
    "idle of ideal": "the idle time is compared with the time without it, not with the whole step",
    "no chunks": "the chunks are forgotten: they make the bubble v times shorter",
    "v of all": "v multiplies p - 1, too; chunks shorten what is computed at once: v m + p - 1",
    "p": "p is taken for p - 1: the last stage does not wait for itself",
    "m - 1": "m - 1 is taken for m: the first microbatch computes, too",
    "m - 1 of ideal": "it is (p - 1)/(v (m - 1)); of the whole step it is (p - 1)/(v m + p - 1)",
    "dp": "the batch is not divided by dp: each replica has its own part",
    "sequences": "sequences are taken for microbatches",
}


def hours_of(plan: Plan, how: str = "") -> float:
    """Return the hours that a run is expected to take; `how` is one of `LOOKS`."""
    safe = survives(plan, how)
    failures = (
        plan.hours * {"one GPU": 1, "nodes": plan.gpus / 8}.get(how, plan.gpus) / plan.gpu_mtbf
    )
    failures *= plan.rented / plan.hours if how == "while rented" else 1
    failures = {
        "down": failures // 1,
        "up": -(-failures // 1),
        "one at least": max(1.0, failures),
    }.get(how, failures)
    lost = plan.every * {"whole interval": 1.0}.get(how, 0.5) if safe else plan.hours / 2
    lost = plan.hours if how == "whole run" and not safe else lost
    lost += plan.every if how == "one kept" and safe and plan.kept == 1 else 0
    lost = {"restart alone": 0.0, "half an interval": plan.every / 2}.get(how, lost)
    taken = plan.hours + failures * (lost + (0 if how == "no restart" else plan.restart))
    taken += plan.noticed if how == "notices" else 0
    return plan.hours if how == "no failures" else taken


def survives(plan: Plan, how: str = "") -> bool:
    """Tell whether a checkpoint survives a dead node."""
    return (plan.every > 0 or how == "unwritten") and (plan.shared or how == "own disks")


def missing(plan: Plan, how: str = "") -> dict[str, bool]:
    """Return for each failure whether a plan does not defend against it; `how` is one of
    `LOOKS`.
    """
    written, safe = plan.every > 0 or how == "unwritten", survives(plan, how)
    oldest = (plan.kept - {"oldest": 0.0, "middle": 0.5}.get(how, 1.0)) * plan.every
    unseen = plan.noticed == 0 and how not in ("nobody", "nobody but checkpoints")
    again = oldest < plan.noticed
    again = {
        "one": plan.every < plan.noticed,
        "two": plan.kept < 2,
        "older": oldest <= plan.noticed,
    }.get(how, again)
    again = again and plan.every > 0 if how == "unwritten" else again
    again = again or {"nobody but checkpoints": plan.every == 0, "shared loss": not safe}.get(
        how, False
    )
    torn = plan.kept < {"newest": 1, "three": 3}.get(how, 2) and not (
        how == "shared is whole" and plan.shared
    )
    return {
        "dead node": not safe or (how == "two for a node" and plan.kept < 2),
        "torn checkpoint": torn or not written or (how == "torn on own disks" and not safe),
        "hang": (
            not plan.limit
            or (how == "limit needs checkpoints" and not written)
            or (how == "limit needs safe checkpoints" and not safe)
        )
        and not (how == "checkpoints end a hang" and safe)
        and not (how == "ranks end a hang" and plan.by_rank),
        "slow rank": not plan.by_rank
        and not (how == "limit finds slowness" and plan.limit)
        and not (how == "loss shows slowness" and plan.noticed > 0),
        "bad loss": unseen or again,
        "late end": hours_of(plan, how) > plan.rented
        or (how == "hangs are late" and not plan.limit)
        or (how == "just as long" and hours_of(plan) >= plan.rented),
    }


LOOKS = {
    "own disks": "checkpoints on a node's own disks count as safe: they die with the node",
    "one GPU": "the cluster is taken to fail as seldom as one GPU: any of its GPUs can fail",
    "whole interval": "a whole interval is lost on average; it is half of one",
    "restart alone": "no work is lost, only the restart",
    "half an interval": "half an interval is lost where no checkpoint survives, too; there the run begins again",
    "whole run": "the whole run is lost where no checkpoint survives; on average it is half of it",
    "no restart": "the restart takes no time",
    "no failures": "nothing fails",
    "down": "expected failures are rounded down; they are an average",
    "up": "expected failures are rounded up; they are an average",
    "one at least": "at least one failure is expected; a short run on few GPUs expects less than one",
    "nodes": "nodes of eight fail as seldom as one GPU: any GPU can be the one",
    "while rented": "failures are counted in the hours that are rented; they are expected in the run's hours",
    "notices": "the hours until somebody looks at the loss count, too",
    "just as long": "a run that takes just as long as the cluster is rented is late; it is in time",
    "one kept": "with one checkpoint kept an interval more is lost; a node dies here, and not the writing",
    "hangs are late": 'a run without a limit is late for that alone; that is "hang"',
    "unwritten": "a plan that writes no checkpoints is forgotten: every is 0 there, whatever it says of "
    "keeping them",
    "two for a node": "a dead node is taken to need two checkpoints; one is enough, if it is elsewhere",
    "three": "three checkpoints are wanted; the one before the torn one is enough",
    "shared is whole": "shared storage is taken to keep a checkpoint whole whose writer dies",
    "torn on own disks": "checkpoints on the nodes' own disks are taken for none; the job dies here, and no node",
    "newest": "the newest checkpoint is taken to be whole: it may be the one that was being written",
    "oldest": "k kept checkpoints reach back k intervals; right after one is written it is k - 1",
    "middle": "k kept checkpoints reach back k - 1/2 intervals, on average; the least that they reach back "
    "is k - 1",
    "one": "one interval is taken for the age of the oldest checkpoint; it is k - 1 of them",
    "two": "two checkpoints are taken to be old enough, whenever somebody notices",
    "older": "the oldest checkpoint has to be older; as old is enough",
    "shared loss": "checkpoints on the nodes' own disks are taken for none; no node dies here",
    "nobody but checkpoints": "nobody looks at the loss, and it is taken to be noticed at once",
    "nobody": "nobody looks at the loss, and whatever is kept is taken to be old enough",
    "checkpoints end a hang": "checkpoints are taken to end a hang: somebody has to end the job",
    "limit needs checkpoints": "a limit is taken to need checkpoints; it ends the job in any case",
    "limit needs safe checkpoints": "a limit is taken to need checkpoints that outlive a node; it ends any job",
    "ranks end a hang": "who compares ranks is taken to end a hang; the job waits all the same",
    "loss shows slowness": "who looks at the loss is taken to see a slow rank; a slow rank computes the same loss",
    "limit finds slowness": "a limit is taken to find a slow rank: it is slow, and in time",
}

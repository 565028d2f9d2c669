"""Lesson 20, tasks 2 and 3: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from judges import (
    Layout,
    Machine,
    Model,
    layout_of,
    likeliest,
    machine_of,
    model_of,
    numbers,
    own,
    same,
    seconds_of,
    times,
)

from minidist import Communicator
from minidist.course.grader.contract import Arrays, Case, Note, Wrong, known

KINDS = ("parameters", "gradients", "optimizer", "activations")
REASONS = ("", "gpus", "node", "heads", "layers", "batch", "stages", "memory")
SHAPES = ((4, 2), (8, 1), (2, 8), (3, 2), (1, 1), (16, 1), (8, 16), (5, 4))  # tp, pp


# ---------------------------------------------------------------- the programs


def run_held(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run `held` for every layout."""
    model, batch = own(exercise, model_of(given)), int(given["batch"])
    found = [
        exercise.held(model, own(exercise, layout_of(row)), batch)
        for row in given["layouts"].tolist()
    ]
    return {"held": [numbers("held", each, KINDS) for each in found]}


def run_fits(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run `replicas` for some shapes (-1 where they are refused), and `fits` for some bytes."""
    machine, counts = own(exercise, machine_of(given)), []
    for shape in SHAPES:
        try:
            counts.append(int(exercise.replicas(machine, *shape)))
        except ValueError:
            counts.append(-1)
    told = [
        exercise.fits(machine, dict(zip(KINDS, row, strict=True)))
        for row in given["bytes"].tolist()
    ]
    return {"replicas": counts, "fits": [bool(each) for each in told]}


def run_best(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run `best`; -1 stands for None."""
    layouts = [own(exercise, layout_of(row)) for row in given["layouts"].tolist()]
    asked = (
        own(exercise, model_of(given)),
        own(exercise, machine_of(given)),
        layouts,
        int(given["batch"]),
    )
    chosen, refused = exercise.best(*asked)
    if chosen is not None and int(chosen) < 0:
        raise Wrong(
            f"best chooses layout {chosen}, expected a number from 0, or None if all are refused"
        )
    if [each for each in refused if each not in REASONS] or len(refused) != len(layouts):
        raise Wrong(
            f"best refuses for {refused!r}, expected one of REASONS for each of the "
            f"{len(layouts)} layouts"
        )
    return {
        "chosen": -1 if chosen is None else int(chosen),
        "refused": [REASONS.index(each) for each in refused],
    }


# ---------------------------------------------------------------- the judges


def judge_held(
    case: Case, results: Sequence[Arrays], notes: Sequence[Note], kinds: Sequence[str] = KINDS
) -> None:
    """Compare some categories with the formulas, and with those of known mistakes."""
    model, batch = model_of(case.given[0]), int(case.given[0]["batch"])
    layouts = [layout_of(row) for row in case.given[0]["layouts"].tolist()]

    def all_of(each: Sequence[Mapping[str, float]]) -> dict[tuple[int, str], float]:
        return {
            (number, kind): value
            for number, bytes in enumerate(each)
            for kind, value in bytes.items()
        }

    answers = [dict(zip(KINDS, values, strict=True)) for values in results[0]["held"].tolist()]
    for number, (layout, found) in enumerate(zip(layouts, answers, strict=True)):
        expected = bytes_of(model, layout, batch)
        for kind in kinds:
            if not same(found[kind], expected[kind]):
                wrongly = {
                    clause: all_of([bytes_of(model, each, batch, how) for each in layouts])
                    for how, clause in SLIPS.items()
                }
                hint = likeliest(wrongly, all_of(answers), (number, kind))
                says = (
                    f"{layout.words()} with a batch of {batch} holds {found[kind] / 1e9:.6g} GB "
                    f"of {kind}, expected"
                )
                raise Wrong(
                    f"{says} {expected[kind] / 1e9:.6g} "
                    f"GB{hint or times(found[kind], expected[kind], layout)}"
                )


def judge_fits(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Compare replicas, and what fits."""
    machine = machine_of(case.given[0])
    for (tp, pp), found in zip(SHAPES, results[0]["replicas"].tolist(), strict=True):
        whole = machine.gpus % (tp * pp) == 0
        expected = machine.gpus // (tp * pp) if whole else -1
        if found != expected:
            wrongly = {
                "each replica has tp GPUs: it has tp for each of its pp stages": machine.gpus // tp,
                "each replica has pp GPUs: each of its stages has tp": machine.gpus // pp,
                "GPUs that are left over are left out: they are paid, too": machine.gpus
                // (tp * pp),
                "it also asks whether tp ranks lie within a node; that is a matter of `best`": (
                    -1 if tp > machine.node else None
                ),
            }
            says = (
                f"{machine.gpus} GPUs with tp={tp} and pp={pp} are "
                f"{found if found >= 0 else 'refused'}"
            )
            hint = known(wrongly, found.__eq__)
            raise Wrong(
                f"{says}, expected {f'{expected} replicas' if whole else 'a ValueError'}{hint}"
            )
    told, rows = results[0]["fits"].tolist(), case.given[0]["bytes"].tolist()
    guesses: dict[str, list[bool]] = {}
    guesses["only the largest category has to fit; their sum has to"] = [
        max(each) <= room_of(machine) for each in rows
    ]
    guesses["what fills the memory to the last byte does not fit; it does"] = [
        sum(each) < room_of(machine) for each in rows
    ]
    guesses |= {
        clause: [sum(each) <= room_of(machine, how) for each in rows]
        for how, clause in ROOMS.items()
    }
    guesses["it is the other way round: what does not fit is said to"] = [
        sum(each) > room_of(machine) for each in rows
    ]
    for kind in range(len(KINDS)):
        guesses[f"{KINDS[kind]} are left out"] = [
            sum(each) - each[kind] <= room_of(machine) for each in rows
        ]
    guesses |= {"everything fits": [True] * len(rows), "nothing fits": [False] * len(rows)}
    fitting = [clause for clause, answers in guesses.items() if answers == told]
    for row, found in zip(rows, told, strict=True):
        if found != (sum(row) <= room_of(machine)):
            hint = known({", or if ".join(fitting[:2]): bool(fitting)}, bool)
            says = (
                f"{sum(row):,.0f} bytes beside {machine.reserved} GiB reserved of "
                f"{machine.memory} GiB"
            )
            raise Wrong(
                f"{says} {'do not fit' if found else 'fit'}, but fits returns {bool(found)}{hint}"
            )


def judge_best(
    case: Case,
    results: Sequence[Arrays],
    notes: Sequence[Note],
    about: Sequence[str] = REASONS,
    choose: bool = True,
) -> None:
    """Compare why layouts are refused, of those that are for some reasons, and which is chosen."""
    given = case.given[0]
    model, machine, batch = model_of(given), machine_of(given), int(given["batch"])
    layouts = [layout_of(row) for row in given["layouts"].tolist()]
    expected = [refusal(model, machine, layout, batch) for layout in layouts]
    for number, (layout, code) in enumerate(
        zip(layouts, results[0]["refused"].tolist(), strict=True)
    ):
        found = REASONS[int(code)]
        if found != expected[number] and expected[number] in about:
            true = reasons(model, machine, layout, batch)
            because = why(model, machine, layout, batch)
            hint = ". The first reason that is true counts" if found in true else ""
            hint = (
                f". {found!r} is not true: {because['not ' + found]}"
                if found and found not in true
                else hint
            )
            raise Wrong(
                f"layout {number}, {layout.words()}, is "
                f"{f'refused for {found!r}' if found else 'accepted'}, expected "
                f"{expected[number]!r}: {because[expected[number]]}{hint}"
            )
    best = choice(model, machine, layouts, batch)
    if choose and (chosen := int(results[0]["chosen"])) != best:
        says = (
            f"the best is layout {chosen if chosen >= 0 else None}, expected "
            f"{best if best >= 0 else None}"
        )
        none = (
            ": all are refused, so there is no best one"
            if best < 0
            else ": some are not refused, so one is the best"
        )
        raise Wrong(
            says
            + (
                loses(model, machine, layouts, batch, chosen, best)
                if min(chosen, best) >= 0
                else none
            )
        )


def loses(
    model: Model, machine: Machine, layouts: Sequence[Layout], batch: int, chosen: int, best: int
) -> str:
    """Say why a choice is not the best."""
    if chosen >= len(layouts):
        return f": there are {len(layouts)} layouts, counted from 0"
    left = [i for i, each in enumerate(layouts) if not refusal(model, machine, each, batch)]
    if reason := refusal(model, machine, layouts[chosen], batch):
        says = (
            f": it chooses one that is refused, for {reason!r}. First what does not fit is "
            "refused, then time counts"
        )
        counted = {
            "layouts are counted from 1": best + 1,
            "only those are counted that are left": left.index(best),
        }
        return says + known(counted, chosen.__eq__).replace(": this", ". This")
    (slow, more), (fast, fewer) = (
        measured(model, machine, layouts[i], batch) for i in (chosen, best)
    )
    if not same(slow, fast):
        costs = [(seconds_of(model, machine, layouts[i], batch), i) for i in left]
        guesses = {
            f"{part} does not count": min(
                (sum(each.values()) - each[part], i) for each, i in costs
            )[1]
            for part in ("recomputing", "tensor", "bubble", "data")
        }
        guesses |= {
            "its place among those that are not refused is returned, not that among all": left.index(
                best
            ),
            "computing alone counts": min((each["computing"], i) for each, i in costs)[1],
            "the first that fits is taken; all are to be compared": left[0],
            "the slowest is taken": max((sum(each.values()), i) for each, i in costs)[1],
            "the fewest bytes count first; what fits, fits": min(
                left, key=lambda i: measured(model, machine, layouts[i], batch)[1]
            ),
        }
        fitting = {
            ", or if ".join(story for story in guesses if guesses[story] == chosen): chosen
            in guesses.values()
        }
        return (
            f": a step takes {slow:.4g} s there, and {fast:.4g} s on the best{known(fitting, bool)}"
        )
    if not same(more, fewer):
        return (
            f": both are as fast, but a GPU holds {more / 1e9:.4g} GB there, and "
            f"{fewer / 1e9:.4g} GB on the best"
        )
    return ": of those that are alike in all, the first is wanted"


# ---------------------------------------------------------------- the formulas, and known mistakes


def bytes_of(model: Model, layout: Layout, batch: int, how: str = "") -> dict[str, float]:
    """Return the bytes of a GPU by category; `how` is one of `SLIPS`."""
    dp, tp, pp, v, b, sp, zero, recompute = layout
    n = model.parameters / {"whole": 1, "no pp": tp, "no tp": pp}.get(how, tp * pp)
    m = {"m of the batch": batch / b, "m of sequences": batch / dp}.get(how, batch / dp / b)
    b = {"one sequence": 1, "all sequences": b * m}.get(how, b)
    sbh = model.sequence * b * model.hidden
    sbh *= 2 if how == "elements" else 1
    whole = sbh * (34 / tp if sp else 10 + 24 / tp)
    whole = {"by tp": sbh * 34 / tp, "never by tp": sbh * 34, "sp is tp": sbh * (10 + 24 / tp)}.get(
        how, whole
    )
    whole = sbh * (24 + 10 / tp) if how == "24 whole" and not sp else whole
    entry = (
        (1 if how in ("elements", "input of one byte") else 2)
        * sbh
        / {"input by tp": tp, "input whole": 1}.get(how, tp if sp else 1)
    )
    kept = entry if recompute and how != "no recomputing" else whole
    flight = min(m, p_of(pp, v)) if how != "more than m" else p_of(pp, v)
    flight = min(m, pp + pp / v) if how == "p for p - 1" and v > 1 else flight
    flight = {
        "one": 1,
        "all m": m,
        "no chunks": min(m, pp),
        "chunks": min(m, pp / v),
        "p - 1": min(m, pp - 1),
    }.get(how, flight)
    flight = min(m, pp + (pp - 1) / v) if how == "always chunks" else flight
    flight = {"up": -(-flight // 1), "down": flight // 1, "one chunk": flight / v}.get(how, flight)
    flight = p_of(pp, v) if how == "more than m in chunks" and v > 1 else flight
    at_work = {
        "no work": 0,
        "work with input": whole,
        "work under way": flight * (whole - kept),
    }.get(how, whole - kept)
    at_work *= model.layers / pp if how == "work of a stage" else 1
    layers = model.layers / {"all layers": 1}.get(how, pp)
    optimizer = {
        "weights alone": 0,
        "two moments": 8,
        "16 bits": 6,
        "one moment": 8,
        "16 bytes": 16,
    }.get(how, 12)
    shards = {"not sharded": 1, "always sharded": dp, "over all": dp * tp * pp}.get(how, dp)
    shards = shards if zero or how == "always sharded" else 1
    everything = dp if zero and how == "ZeRO-3" else 1
    summed = {"sums of 16 bits": 2, "sums of one": 4, "sums by the stages": 4 if pp > 1 else 2}.get(
        how, 4 if m > 1 else 2
    )
    gradients = dp if zero and how in ("ZeRO-2", "ZeRO-3") else 1
    return {
        "parameters": {"4 bytes": 4, "bits": 16}.get(how, 2) * n / everything,
        "gradients": {"weights alone": 0, "bits": 8 * summed, "both": 2 + summed}.get(how, summed)
        * n
        / gradients,
        "optimizer": (4 + 8 / shards if how == "master whole" else optimizer / shards) * n,
        "activations": layers * flight * kept + (at_work if recompute else 0),
    }


def p_of(p: int, v: int) -> float:
    """Return how many microbatches are under way, if there are enough."""
    return p + (p - 1) / v if v > 1 else p


SLIPS = {
    "whole": "a GPU holds the whole model: parameters are divided by tp and by pp",
    "no pp": "parameters are not divided by pp",
    "no tp": "parameters are not divided by tp",
    "weights alone": "2 bytes a parameter are taken for the memory: gradients and optimizer state need 14 more",
    "two moments": "the master copy of the weights is forgotten: Adam has 4 + 4 + 4 bytes in mixed precision",
    "16 bits": "the optimizer state is taken to be in 16 bits; it is in 32",
    "16 bytes": "16 bytes a parameter are all of parameters, gradients and optimizer state; the state has 12 "
    "of them",
    "4 bytes": "parameters have 4 bytes; here they have 2",
    "sums of 16 bits": "the gradients of several microbatches are added up in 16 bits; in 32 they have 4 bytes",
    "sums of one": "gradients have 4 bytes also where there is one microbatch, and nothing is added up",
    "sums by the stages": "gradients have 4 bytes where there are several stages; it is several microbatches",
    "both": "the gradients of one microbatch are there beside the sum of all; they are added to it as "
    "they come",
    "bits": "bits are taken for bytes",
    "not sharded": "ZeRO-1 does not shard the optimizer state: each of the dp ranks holds 1/dp of it",
    "always sharded": "the optimizer state is sharded without ZeRO, too",
    "over all": "the optimizer state is divided by tp and pp twice: ZeRO-1 divides what a GPU has left by "
    "dp",
    "master whole": "ZeRO-1 leaves the master copy whole; it is optimizer state, and sharded, too",
    "ZeRO-2": "gradients are sharded, too: that is ZeRO-2",
    "ZeRO-3": "parameters and gradients are sharded, too: that is ZeRO-3",
    "by tp": "tp divides all activations: without sequence parallelism 10 of 34 bytes stay whole on every "
    "rank",
    "never by tp": "activations are not divided by tp at all",
    "24 whole": "the wrong part is divided: 24 of 34 bytes are divided by tp, 10 stay whole",
    "sp is tp": "10 bytes stay whole with sequence parallelism, too; it divides them by tp",
    "one": "one microbatch is under way: the first stage holds p, so pp alone saves no activations",
    "all m": "all m microbatches are under way, as in GPipe; 1F1B holds p",
    "p - 1": "p - 1 microbatches are under way; the first stage holds p",
    "more than m": "p microbatches are under way also where there are fewer",
    "m of the batch": "m is the batch by the microbatch's size: the batch is to be divided by dp, too",
    "m of sequences": "m is the number of sequences: they are in microbatches",
    "no chunks": "chunks hold no more than 1F1B; they hold p + (p - 1)/v microbatches",
    "chunks": "microbatches under way are divided by the chunks; chunks hold more, not fewer",
    "always chunks": "p + (p - 1)/v are under way with one chunk, too; 1F1B holds p",
    "p for p - 1": "p + p/v microbatches are under way with chunks; it is p + (p - 1)/v",
    "up": "microbatches under way are rounded up; a chunk holds a part of one",
    "down": "microbatches under way are rounded down; a chunk holds a part of one",
    "one chunk": "a GPU has the layers of one chunk; it has v of them",
    "more than m in chunks": "more microbatches are under way with chunks than there are",
    "elements": "the 34 bytes are taken for elements of 2 bytes",
    "one sequence": "a microbatch is taken for one sequence, whatever its size",
    "all sequences": "a microbatch is taken for the whole part of a replica",
    "all layers": "a stage has all layers: they are not divided by pp",
    "no recomputing": "nothing is recomputed",
    "no work": "the layer that is computed again is forgotten: while it is at work, all of it is there",
    "work with input": "the input of the layer that is computed again counts twice",
    "work under way": "one layer is computed again for each microbatch under way; only one is at a time",
    "work of a stage": "a whole stage is computed again at once; it is one layer at a time",
    "input of one byte": "an element of the layer's input has one byte; it has 2",
    "input by tp": "the layer's input is divided by tp without sequence parallelism; it is whole on every "
    "rank",
    "input whole": "the layer's input is whole; sequence parallelism divides it by tp",
}


def room_of(machine: Machine, how: str = "") -> float:
    """Return the bytes that a GPU has room for; `how` is one of `ROOMS`."""
    unit = {"decimal": 1e9, "MiB": 2**20, "bits": 2**33, "TiB": 2**40}.get(how, 2**30)
    reserved = machine.reserved * {
        "nothing reserved": 0,
        "reserved in GB": 1e9 / 2**30,
        "reserved twice": 2,
        "added": -1,
    }.get(how, 1)
    return (machine.memory - reserved) * unit


ROOMS = {
    "decimal": "GiB are taken for GB: 1 GiB has 2^30 bytes",
    "reserved in GB": "what is reserved is taken in GB; it is in GiB",
    "reserved twice": "what is reserved is subtracted twice",
    "added": "what is reserved is added to the memory, not taken off",
    "MiB": "GiB are taken for MiB: 1 GiB has 2^30 bytes",
    "TiB": "GiB are taken for TiB: 1 GiB has 2^30 bytes",
    "bits": "bytes are compared with bits",
    "nothing reserved": "what driver and NCCL take is taken to be free",
}


def reasons(model: Model, machine: Machine, layout: Layout, batch: int) -> list[str]:
    """Return all reasons to refuse a layout, the first first."""
    dp, tp, pp, v, b, *_ = layout
    checks = {
        "gpus": dp * tp * pp != machine.gpus,
        "node": tp > machine.node,
        "heads": model.heads % tp != 0,
        "layers": model.layers % (pp * v) != 0,
        "batch": batch % (dp * b) != 0,
        "stages": batch < pp * dp * b,
    }
    checks["memory"] = sum(bytes_of(model, layout, batch).values()) > room_of(machine)
    return [reason for reason, true in checks.items() if true]


def refusal(model: Model, machine: Machine, layout: Layout, batch: int) -> str:
    """Return why a layout is refused."""
    return next(iter(reasons(model, machine, layout, batch)), "")


def measured(model: Model, machine: Machine, layout: Layout, batch: int) -> tuple[float, float]:
    """Return seconds and bytes."""
    return sum(seconds_of(model, machine, layout, batch).values()), sum(
        bytes_of(model, layout, batch).values()
    )


def choice(model: Model, machine: Machine, layouts: Sequence[Layout], batch: int) -> int:
    """Return the number of the best layout, -1 if all are refused."""
    left = [i for i, layout in enumerate(layouts) if not refusal(model, machine, layout, batch)]
    if not left:
        return -1
    costs = {i: measured(model, machine, layouts[i], batch) for i in left}
    fastest = min(seconds for seconds, _ in costs.values())
    alike = {i: bytes for i, (seconds, bytes) in costs.items() if same(seconds, fastest)}
    return next(i for i in sorted(alike) if same(alike[i], min(alike.values())))


def why(model: Model, machine: Machine, layout: Layout, batch: int) -> dict[str, str]:
    """Return for each reason what is behind it."""
    dp, tp, pp, v, b, *_ = layout
    bytes, room = sum(bytes_of(model, layout, batch).values()) / 1e9, room_of(machine) / 1e9
    return {
        "": f"it fits, with {bytes:.1f} of {room:.1f} GB, and all numbers divide",
        "gpus": f"it uses {dp * tp * pp} GPUs, and there are {machine.gpus}",
        "node": f"tp={tp} crosses nodes of {machine.node} GPUs",
        "heads": f"tp={tp} does not divide {model.heads} heads",
        "layers": f"{pp} stages of {v} parts are {pp * v}, and there are {model.layers} layers",
        "batch": f"{batch} sequences are not {dp} parts of whole microbatches of {b}",
        "stages": f"a replica has {batch // (dp * b)} microbatches for {pp} stages: the batch is "
        "divided by dp first",
        "memory": f"a GPU holds {bytes:.1f} GB, and has room for {room:.1f} GB",
        "not gpus": f"it uses all {machine.gpus} GPUs",
        "not node": f"tp={tp} lies within a node of {machine.node} GPUs",
        "not heads": f"tp={tp} divides {model.heads} heads",
        "not layers": f"{pp} stages of {v} parts are {pp * v}, which divides {model.layers} layers",
        "not batch": f"{batch} sequences are {dp} parts of {batch // (dp * b)} microbatches of {b}",
        "not stages": f"a replica has {batch // (dp * b)} microbatches, and {pp} stages need no more than "
        f"{pp}",
        "not memory": f"a GPU holds {bytes:.1f} GB, and has room for {room:.1f} GB",
    }

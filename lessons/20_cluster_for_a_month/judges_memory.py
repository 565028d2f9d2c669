"""Lesson 20, task 2: the programs that run beside an answer, and their judges."""

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
    times,
)

from minidist import Communicator
from minidist.course.grader.contract import Arrays, Case, Note, Wrong, known

KINDS = ("parameters", "gradients", "optimizer", "activations")
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
            hint = known(dict.fromkeys(fitting, True), bool)
            says = (
                f"{sum(row):,.0f} bytes beside {machine.reserved} GiB reserved of "
                f"{machine.memory} GiB"
            )
            raise Wrong(
                f"{says} {'do not fit' if found else 'fit'}, but fits returns {bool(found)}{hint}"
            )


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

"""Lesson 20, task 1: the program that runs beside an answer, and its judge. All judges read what is
given here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

from minidist import Communicator
from minidist.course.grader.contract import (
    Arrays,
    Case,
    Note,
    Wrong,
    expect,
    known,
)

PARTS = ("computing", "recomputing", "tensor", "bubble", "data")
HIDDEN = (
    ": all of it hides, behind more than one backward, or in a ring too fast, as if dp ranks were "
    "neighbours"
)
CLOSE = 1e-6  # of what is expected: a formula that is added up in another order


class Model(NamedTuple):
    """As in the exercise."""

    parameters: float
    layers: int
    hidden: int
    heads: int
    sequence: int


class Machine(NamedTuple):
    """As in the exercise."""

    gpus: int
    node: int
    peak: float
    reached: float
    memory: float
    reserved: float
    inside: float
    card: float
    price: float


class Layout(NamedTuple):
    """As in the exercise."""

    dp: int
    tp: int
    pp: int
    chunks: int = 1
    microbatch: int = 1
    sp: bool = False
    zero: int = 0
    recompute: bool = False

    def words(self) -> str:
        """Return how an exercise writes it."""
        shown = [
            f"{name}={value}"
            for name, value in self._asdict().items()
            if value != Layout._field_defaults.get(name)
        ]
        return f"Layout({', '.join(shown)})"


def model_of(given: Arrays) -> Model:
    """Return the model that is given."""
    n, *sizes = given["model"].tolist()
    return Model(n, *map(int, sizes))


def machine_of(given: Arrays) -> Machine:
    """Return the machine that is given."""
    gpus, node, *rest = given["machine"].tolist()
    return Machine(int(gpus), int(node), *rest)


def layout_of(row: Sequence[int]) -> Layout:
    """Return a layout from its row."""
    dp, tp, pp, chunks, microbatch, sp, zero, recompute = map(int, row)
    return Layout(dp, tp, pp, chunks, microbatch, bool(sp), zero, bool(recompute))


def own(exercise: ModuleType, given: Model | Machine | Layout) -> Any:
    """Return the same as an object of the student's own class."""
    return getattr(exercise, type(given).__name__)(*given)


def numbers(what: str, found: Any, names: Sequence[str]) -> list[float]:
    """Return the values of an answer by name; raise `Wrong` if it is no mapping with just these
    names.
    """
    if not hasattr(found, "keys") or set(found) != set(names):
        raise Wrong(
            f"{what} returns {found!r}, expected a dictionary with the keys {', '.join(names)}"
        )
    return [float(found[name]) for name in names]


# ---------------------------------------------------------------- the program


def run_step(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run `step`."""
    layout, batch = layout_of(given["layout"]), int(given["batch"])
    asked = (
        own(exercise, model_of(given)),
        own(exercise, machine_of(given)),
        own(exercise, layout),
        batch,
    )
    return {"step": numbers("step", exercise.step(*asked), PARTS)}


# ---------------------------------------------------------------- the judges


def judge_step(
    case: Case, results: Sequence[Arrays], notes: Sequence[Note], parts: Sequence[str] = PARTS
) -> None:
    """Compare some parts of a step with the formulas, and with those of known mistakes."""
    given, found = case.given[0], dict(zip(PARTS, results[0]["step"].tolist(), strict=True))
    model, machine, layout, batch = (
        model_of(given),
        machine_of(given),
        layout_of(given["layout"]),
        int(given["batch"]),
    )
    asked = model, machine, layout, batch
    expected = seconds_of(*asked)
    for part in parts:
        ways = {
            clause: partial(lambda how, part: seconds_of(*asked, how)[part], how, part)
            for how, clause in SLIPS.items()
        }
        if same(found[part], expected[part]):
            expect(True, "", ways, partial(same, expected[part]))
        else:
            wrongly = {clause: seconds_of(*asked, how) for how, clause in SLIPS.items()}
            says = (
                f"{part} of {layout.words()} with a batch of {batch} is {found[part]:.6g} s, "
                "expected"
            )
            hint = HIDDEN if part == "data" and not found[part] else likeliest(wrongly, found, part)
            raise Wrong(
                f"{says} {expected[part]:.6g} s{hint or times(found[part], expected[part], layout)}"
            )


def likeliest(
    wrongly: Mapping[str, Mapping[Any, float]], found: Mapping[Any, float], part: Any
) -> str:
    """Return, in words, the mistake that gives this part and most of the others, or nothing."""
    fitting = {
        clause: values for clause, values in wrongly.items() if same(found[part], values[part])
    }
    counts = {
        clause: sum(same(found[name], values[name]) for name in found)
        for clause, values in fitting.items()
    }
    most = [clause for clause in counts if counts[clause] == max(counts.values())]
    return known(dict.fromkeys(most, True), bool)


def same(found: float, expected: float) -> bool:
    """Tell whether two numbers are the same but for rounding."""
    return abs(found - expected) <= CLOSE * abs(expected)


def times(found: float, expected: float, layout: Layout) -> str:
    """Say by which factor a value is off, if it is a size of the layout or a unit."""
    factors = {
        name: float(getattr(layout, name)) for name in ("dp", "tp", "pp", "chunks", "microbatch")
    }
    factors |= {
        "dp tp": layout.dp * layout.tp,
        "tp pp": layout.tp * layout.pp,
        "dp tp pp": layout.dp * layout.tp * layout.pp,
    }
    factors |= {
        "8, as of bits and bytes": 8.0,
        "2": 2.0,
        "3": 3.0,
        "1000": 1e3,
        "1024": 1024.0,
        "24 hours": 24.0,
    }
    for name, factor in factors.items():
        if factor != 1 and same(found, factor * expected):
            return f": it is {name} times as much"
        if factor != 1 and same(factor * found, expected):
            return f": it is divided by {name} once more"
    return ""


# ---------------------------------------------------------------- the formulas, and known mistakes


def seconds_of(
    model: Model, machine: Machine, layout: Layout, batch: int, how: str = ""
) -> dict[str, float]:
    """Return the seconds of a step by part; `how` is one of `SLIPS`."""
    n, layers, h, _, s = model
    dp, tp, pp, v, b, sp, zero, recompute = layout
    m = {"dp": batch / b, "microbatch": batch / dp, "m is b": b}.get(how, batch / dp / b)
    rate = machine.peak * {"peak": 1.0, "reached above": 1 / machine.reached}.get(
        how, machine.reached
    )
    m = 1 if how == "one microbatch" else m
    of_attention = {
        "attention": 0,
        "attention of 6": 6,
        "attention of 4": 4,
        "attention of 8": 8,
    }.get(how, 12)
    of_attention *= {
        "one layer": 1 / layers,
        "each head": model.heads,
        "heads for h": model.heads / h,
    }.get(how, 1)
    one = b * s * (6 * n + of_attention * layers * s * h) / (tp * pp * rate)
    one *= {"forward": 1 / 3, "stages": pp, "tensor ranks": tp}.get(how, 1)
    again = (
        one
        * {"again all": 1, "again backward": 2 / 3, "again half": 1 / 2}.get(how, 1 / 3)
        * (recompute or how == "always again")
    )

    def ring(bytes: float, ranks: int, span: int) -> float:
        unit, apart = 2**30 if how == "binary" else 1e9, span // ranks
        mine = max(1, machine.node // apart)  # of the ring's ranks, in a node
        cards = {"own card": 1, "shared card": mine / machine.node, "all cards": machine.node}.get(
            how, mine
        )
        card = cards * machine.card * unit / {"bits": 1}.get(how, 8)
        card = card if how == "faster than inside" else min(card, machine.inside * unit)
        near = {"all inside": True, "all across": False, "ranks alone": ranks <= machine.node}.get(
            how, span <= machine.node
        )
        sent = {"n": 1.0, "once": (ranks - 1) / ranks, "2n": 2.0, "P": 2 * (ranks - 1)}.get(
            how, 2 * (ranks - 1) / ranks
        )
        return (sent if ranks > 1 else 0) * bytes / (machine.inside * unit if near else card)

    again_sends = recompute or how == "always 6"
    count = (
        {"two": 2, "forward's": 4, "both": 8}.get(how, 6)
        if again_sends
        else {"two": 2, "both": 8}.get(how, 4)
    )
    at = layers / {"all layers": 1}.get(how, pp)
    tensor = (
        at
        * count
        * ring(
            {"elements": 1, "32 bits": 4}.get(how, 2) * s * (1 if how == "one" else b) * h, tp, tp
        )
    )
    tensor /= {"sp halves": 2, "sp divides": tp}.get(how, 1) if sp else 1
    found = {"computing": m * one, "recomputing": m * again, "tensor": m * tensor}
    ideal = found["computing"] if how == "bubble of computing" else sum(found.values())
    ideal -= found["recomputing"] if how == "bubble without recomputing" else 0
    shares = {
        "of step": (pp - 1) / (v * m + pp - 1),
        "no chunks": (pp - 1) / m,
        "p": pp / (v * m),
        "m - 1": (pp - 1) / (v * max(1, m - 1)),
        "v m - 1": (pp - 1) / max(1, v * m - 1),
        "without the first": (pp - 1) / max(1, v * m + pp - 2),
        "bubble dp": (pp - 1) / (v * batch / b),
        "bubble sequences": (pp - 1) / (v * batch / dp),
        "times v": v * (pp - 1) / m,
        "chunks are stages": (pp * v - 1) / (v * m),
        "right": (pp - 1) / (v * m),
    }
    found["bubble"] = shares.get(how, shares["right"]) * ideal
    held = n / {"whole gradients": 1, "whole stage": pp, "whole layer": tp}.get(how, tp * pp)
    wide = {"32 bits": 4, "elements": 1}.get(how, 2)
    hides = {
        "hides nothing": 0.0,
        "hides forward": one + again,
        "hides all": m * (2 / 3 * one + again),
        "hides the step": m * (one + again),
        "hides no recomputing": 2 / 3 * one,
        "hides a third": 1 / 3 * one + again,
        "hides half": 1 / 2 * one + again,
        "hides two thirds": 2 / 3 * (one + again),
        "hides messages": 2 / 3 * one + again + tensor * (2 / 3 if recompute else 1 / 2),
        "hides all messages": 2 / 3 * one + again + tensor,
    }
    wide = 4 if how == "gradients of 32 bits" else wide
    gradients = ring(wide * held, dp, tp * dp) / (2 if how == "ZeRO halves" and zero else 1)
    late = gradients - hides.get(how, 2 / 3 * one + again)
    found["data"] = late if how == "negative" else max(0.0, late)
    found["bubble"] += shares["right"] * found["data"] if how == "bubble of data" else 0
    return found


SLIPS = {
    "peak": "the data sheet's peak is taken as the FLOP/s that a GPU reaches",
    "reached above": "the peak is divided by what is reached, or the product with it is not in brackets",
    "one layer": "the attention of one layer counts, 12 s h a token; there are L layers",
    "each head": "attention is multiplied by the heads; h are the channels of all of them",
    "heads for h": "h is taken for the heads; it is the channels",
    "always again": "recomputing takes time also where nothing is recomputed",
    "one microbatch": "one microbatch counts, not all m of a step",
    "always 6": "there are 6 all-reduces also without recomputing; then it is 4",
    "chunks are stages": "p v - 1 is taken for p - 1: chunks are parts of a stage, and no more stages",
    "hides a third": "it hides behind a third of computing; the backward is two thirds",
    "hides half": "it hides behind half of computing; the backward is two thirds",
    "attention": "the operations of attention, 12 L s h a token, are left out",
    "attention of 6": "attention counts 6 L s h, not 12",
    "attention of 4": "attention counts 4 L s h, its forward alone; with backward it is 12",
    "attention of 8": "attention counts 8 L s h, its backward alone; with forward it is 12",
    "forward": "only the forward's third of the operations counts",
    "dp": "the batch is not divided by dp: each replica has its own part",
    "microbatch": "a microbatch is taken for one sequence, whatever its size",
    "stages": "a GPU computes all stages: the work is not divided by pp",
    "tensor ranks": "a GPU computes whole layers: the work is not divided by tp",
    "again all": "recomputing runs forward and backward once more; it is the forward alone, a third",
    "again backward": "recomputing runs the backward once more; it is the forward, a third",
    "again half": "the forward is taken for half of the operations; it is a third",
    "n": "an all-reduce of n bytes sends n bytes; a ring sends 2 (P - 1)/P n",
    "once": "an all-reduce sends (P - 1)/P n, which is a reduce-scatter alone",
    "2n": "an all-reduce sends 2 n bytes; a ring sends 2 (P - 1)/P n",
    "P": "each rank sends all n bytes in every step of the ring, not 1/P of them",
    "binary": "a GB/s is taken for 2^30 bytes a second; it has 10^9",
    "shared card": "all GPUs of a node share one card; each has its own",
    "own card": "a ring across nodes has one card; it has those of all its ranks in a node",
    "all cards": "a ring across nodes has all cards of a node; it has those of its own ranks there",
    "faster than inside": "the cards carry a ring faster than the links inside a node, which it passes through, too",
    "one": "an activation is that of one sequence; a microbatch may have more",
    "sp halves": "sequence parallelism sends half; its reduce-scatter and its all-gather send what an "
    "all-reduce does",
    "sp divides": "sequence parallelism divides what is sent by tp; it divides what is kept",
    "bits": "the card's Gb/s are taken for GB/s: a byte has 8 bits",
    "all inside": "every group is taken to lie within a node",
    "all across": "every group is taken to cross nodes",
    "ranks alone": "dp ranks are taken for neighbours, but tp ranks lie between two of them",
    "two": "only the forward's 2 all-reduces of a layer count; backward has 2, too",
    "forward's": "recomputing sends nothing: its forward has 2 all-reduces of its own",
    "both": "attention and MLP have 4 all-reduces each; they have 4 together",
    "all layers": "a GPU has all layers: they are not divided by pp",
    "elements": "elements are taken for bytes",
    "32 bits": "what is sent has 4 bytes an element, not 2",
    "gradients of 32 bits": "gradients travel in the 4 bytes in which they are added up; 2 bytes are sent",
    "bubble of computing": "the ideal time is computing alone: ranks wait for recomputing and messages, too",
    "bubble without recomputing": "the ideal time is that without recomputing",
    "of step": "the ideal time is multiplied by (p - 1)/(v m + p - 1), which is the bubble's share of the "
    "whole step",
    "no chunks": "the bubble is not divided by the chunks",
    "p": "the bubble is p/(v m) of the ideal time; it is (p - 1)/(v m)",
    "m - 1": "m - 1 is taken for m: the first microbatch computes, too",
    "v m - 1": "v m - 1 is taken for v m: the first microbatch computes, too",
    "without the first": "v m + p - 2 is taken for v m",
    "bubble dp": "m is the batch by the microbatch's size: the batch is to be divided by dp, too",
    "bubble sequences": "m is the number of sequences: they are in microbatches",
    "times v": "chunks make the bubble longer; they divide it",
    "whole gradients": "gradients of the whole model are reduced; a GPU has N/(tp pp) of them",
    "whole stage": "gradients are not divided by tp",
    "whole layer": "gradients are not divided by pp",
    "hides nothing": "nothing is hidden behind the backward of the last microbatch",
    "hides forward": "it also hides behind the forward: no gradient is ready then",
    "hides all": "it hides behind the backward of all microbatches: gradients are complete in the last one "
    "only",
    "hides the step": "it hides behind the whole step: gradients are complete in the last microbatch only",
    "hides two thirds": "two thirds of what is computed again are taken for backward; all of it is done there",
    "hides messages": "it also hides behind the messages of tensor parallelism in backward; only computing "
    "counts",
    "hides all messages": "it also hides behind all messages of tensor parallelism; only computing counts",
    "ZeRO halves": "ZeRO-1 sends half; its reduce-scatter and its all-gather send what an all-reduce does",
    "bubble of data": "data belongs to the ideal time; only computing, recomputing and tensor do",
    "hides no recomputing": "it does not hide behind what is computed again in backward",
    "negative": "what hides more than there is counts as time gained: no less than 0 is left",
}

"""Lesson 20, task 1, the bill: the program that runs beside an answer, and its judge."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from judges import Layout, Machine, Model, machine_of, model_of, own, same, times

from minidist import Communicator
from minidist.course.grader.contract import Arrays, Case, Note, Wrong, known

COSTS = ("days", "money", "mfu")


def run_bill(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run `bill`, for a step with recomputing and without, and for tokens that fill the last
    step.
    """
    asked = own(exercise, model_of(given)), own(exercise, machine_of(given)), int(given["batch"])
    found = [exercise.Bill(*exercise.bill(*asked, *run)) for run in runs(given)]
    return {"bill": [[float(getattr(each, name)) for name in COSTS] for each in found]}


def runs(given: Arrays) -> list[tuple[float, float, bool]]:
    """Return seconds of a step, tokens, and whether layers are computed again, of the runs that are
    asked for.
    """
    length, tokens = given["run"].tolist()
    of_step = int(given["batch"]) * model_of(given).sequence
    return [
        (length, tokens, False),
        (length, tokens, True),
        (length, tokens // of_step * of_step, False),
    ]


def judge_bill(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Compare days, money and MFU."""
    given = case.given[0]
    model, machine, batch = model_of(given), machine_of(given), int(given["batch"])
    for (length, tokens, again), row in zip(runs(given), results[0]["bill"].tolist(), strict=True):
        expected = costs_of(model, machine, batch, length, tokens, again)
        for i, name in enumerate(COSTS):
            if not same(row[i], expected[i]):
                wrongly = {
                    clause: costs_of(model, machine, batch, length, tokens, again, how)[i]
                    for how, clause in BILLS.items()
                }
                hint = known(wrongly, lambda value: same(row[i], value))  # noqa: B023
                said = (
                    f"{name} of {tokens:.0f} tokens in steps of {batch * model.sequence} with "
                    f"recompute={again} "
                )
                said += f"is {row[i]:.9g}, expected {expected[i]:.9g}"
                raise Wrong(said + (hint or times(row[i], expected[i], Layout(1, 1, 1))))


def costs_of(
    model: Model,
    machine: Machine,
    batch: int,
    length: float,
    tokens: float,
    again: bool,
    how: str = "",
) -> tuple[float, float, float]:
    """Return days, money and MFU; `how` is one of `BILLS`."""
    of_step = batch * model.sequence
    steps = {
        "steps down": tokens // of_step,
        "no rounding": tokens / of_step,
        "sequences": -(-tokens // batch),
    }
    steps |= {"one more": tokens // of_step + 1, "one token": tokens}
    hours = steps.get(how, -(-tokens // of_step)) * length / 3600
    hours = {
        "weeks": -(-hours // 168) * 168,
        "days": -(-hours // 24) * 24,
        "hours": -(-hours // 1),
    }.get(how, hours)
    hours *= {"minutes": 60, "hours of seconds": 3600}.get(how, 1)
    exact = machine.gpus / machine.node
    nodes = {"by the day": exact / 24, "rounded nodes": -(-exact // 1), "one more node": exact + 1}
    nodes |= {
        "node price": machine.gpus,
        "one node": 1,
        "price of a GPU": machine.gpus / machine.node**2,
    }
    attention = (
        {"no attention": 0, "attention of 4": 4, "attention of 6": 6}.get(how, 12)
        * model.layers
        * model.sequence
        * model.hidden
    )
    useful = (
        of_step * (6 * model.parameters + attention) * (4 / 3 if how == "hardware" and again else 1)
    )
    useful *= {
        "all tokens": tokens / of_step,
        "of sequences": 1 / model.sequence,
        "a token": 1 / of_step,
        "forward": 1 / 3,
        "lowered": 3 / 4 if again else 1,
        "asked": tokens / of_step / -(-tokens // of_step),
    }.get(how, 1)
    could = (
        length
        * {"one GPU": 1}.get(how, machine.gpus)
        * machine.peak
        * (machine.reached if how == "reached" else 1)
    )
    return (
        hours / 24,
        hours * nodes.get(how, machine.gpus / machine.node) * machine.price,
        useful / could,
    )


BILLS = {
    "minutes": "seconds are divided by 60 once, so minutes count as hours",
    "hours of seconds": "seconds are taken for hours",
    "one token": "there is a step for each token; a step has batch * sequence tokens",
    "all tokens": "the tokens of the whole run count, over the seconds of one step",
    "of sequences": "sequences count, not their tokens",
    "a token": "the operations of one token count, not those of a step",
    "by the day": "days are multiplied by the price; it is that of an hour",
    "rounded nodes": "nodes are rounded up, and a part of a node is paid in full",
    "one more node": "a node more is paid than there are",
    "node price": "the price of a node is paid for each GPU",
    "one node": "one node alone is paid",
    "price of a GPU": "the price is divided among a node's GPUs twice",
    "weeks": "the time is rounded up to weeks",
    "days": "the time is rounded up to days",
    "hours": "the time is rounded up to hours",
    "steps down": "a last step that is not full is left out",
    "one more": "a step is added also where the tokens fill the last one",
    "no rounding": "the last step counts in part; it takes as long as any other",
    "sequences": "the tokens are divided by sequences: a step has batch * sequence tokens",
    "hardware": "operations that are computed again count as useful (that is HFU, of the hardware, not "
    "MFU)",
    "lowered": "what is computed again is taken off: it is not among the operations of the model in the "
    "first place",
    "asked": "the tokens of the run are counted, not those of its steps: the last one counts in full",
    "reached": "the share is that of what a GPU reaches, not of its peak",
    "no attention": "the operations of attention, 12 L s h a token, are left out",
    "attention of 4": "attention counts 4 L s h a token, its forward alone; with backward it is 12",
    "attention of 6": "attention counts 6 L s h a token, not 12",
    "forward": "only the forward's operations count",
    "one GPU": "the peak is that of one GPU",
}

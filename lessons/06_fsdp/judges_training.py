"""Lesson 06, tasks 3 and 4: the program that trains with an answer, and its judge."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from judges import Block, Memory, expect_free, flat, messages_between, parts, run, sent_between
from torch import nn

from minidist import Communicator
from minidist.course.grader.contract import (
    Array,
    Arrays,
    Case,
    Figures,
    Note,
    Wrong,
    expect_close,
)

MOST_WHOLE = 2  # units

RATE = 0.5


def training(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run two steps of task 3, or of task 4 if there are groups."""
    memory, found = Memory(parts(given)), {}
    kind, sizes = (
        (exercise.HybridModel, [int(given["sizes"][1])])
        if given["sizes"][1]
        else (exercise.ShardedModel, [])
    )
    model = kind(list(memory.modules), comm, *sizes)
    memory.mark(comm)
    for step in range(2):
        output = model.forward(torch.tensor(given["x"][step]))
        memory.mark(comm)
        gradients = model.backward(torch.tensor(given["gradient"][step]))
        left = sum(p._grad is not None for module in memory.modules for p in module.parameters())
        found |= {f"output {step}": output.detach().numpy(), f"gradients left {step}": left}
        for unit, (shard, gradient) in enumerate(zip(model.shards, gradients, strict=True)):
            found[f"shard {step}.{unit}"] = shard.detach().clone().numpy()
            if gradient.shape != shard.shape:
                whole = sum(parameter.numel() for parameter in memory.modules[unit].parameters())
                said = ": that is the whole gradient, not this rank's shard" * (
                    gradient.numel() == whole
                )
                shapes = (
                    f"{tuple(gradient.shape)} for unit {unit}, whose shard has shape "
                    f"{tuple(shard.shape)}"
                )
                raise Wrong(f"backward returned a gradient of shape {shapes}{said}")
            found[f"gradient {step}.{unit}"] = gradient.detach().numpy()
            with torch.no_grad():
                shard -= RATE * gradient
        memory.mark(comm)
    return found | {"held": memory.held, "marks": memory.marks, "most": memory.most}


def judge_training(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """Values, memory, and the bytes of each forward and backward, inside groups and across them."""
    figures = judge_values(case, results, notes)
    group = int(case.given[0]["sizes"][1]) or case.ranks
    whole = sum(weight.nbytes for weights in parts(case.given[0]) for weight in weights)
    groups, group_of = case.ranks // group, np.arange(case.ranks) // group
    inside = group_of[:, None] == group_of
    for stage, name in enumerate(("forward", "backward") * 2):
        sent, backward = sent_between(results, notes, stage), name == "backward"
        within, across = (
            (2 if backward else 1) * groups * (group - 1),
            (2 if backward else 0) * (groups - 1),
        )
        for where, among, times in (
            ("inside their groups", inside, within),
            ("to other groups", ~inside, across),
        ):
            if (found := sent[among].sum()) != times * whole:
                raise Wrong(
                    f"in {name} all ranks sent {found} bytes {where}, expected {times} times "
                    f"{whole}"
                )
        for rank, theirs in enumerate(messages_between(results, notes, stage)):
            crossing, units = (
                sum(group_of[note.to] != group_of[rank] for note in theirs),
                len(parts(case.given[0])),
            )
            if backward and groups > 1 and crossing < units:
                sent_once = f"sends {crossing} messages to other groups, for {units} units"
                raise Wrong(
                    f"in backward rank {rank} {sent_once}: each unit has an all-reduce of its own"
                )
    return figures


def judge_values(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """Outputs, shards and gradients are those of one rank that has everything; memory comes and
    goes.
    """
    group = int(case.given[0]["sizes"][1]) or case.ranks
    model = nn.Sequential(*(Block(weights) for weights in parts(case.given[0])))
    groups = case.ranks // group
    earlier = [np.zeros(sum(p.numel() for p in block.parameters())) for block in model]
    for step in range(2):
        model.zero_grad()
        # gradients of ranks < r
        upto = [[np.zeros(sum(p.numel() for p in block.parameters())) for block in model]]
        for rank, given in enumerate(case.given):
            output = run(model, given, step)
            expect_close(
                rank,
                f"step {step}: the output",
                results[rank][f"output {step}"],
                output,
                instead=partial_outputs(model, given, step),
            )
            upto.append([flat(p.grad for p in block.parameters()) for block in model])
        for rank, result in enumerate(results):
            first = rank - rank % group
            for unit, block in enumerate(model):
                shards = [
                    np.array_split(each, group)
                    for each in (flat(block.parameters()), upto[-1][unit])
                ]
                of_group = np.array_split(upto[first + group][unit] - upto[first][unit], group)[
                    rank % group
                ]
                of_rank = np.array_split(upto[rank + 1][unit] - upto[rank][unit], group)[
                    rank % group
                ]
                for name, every in zip(("shard", "gradient"), shards, strict=True):
                    found, instead = result[f"{name} {step}.{unit}"], {}
                    if groups > 1:
                        all_of = np.concatenate(every)
                        story = (
                            "`shard_ranks` is taken for the number of groups, not for the ranks "
                            "of each"
                        )
                        instead[story] = np.array_split(all_of, groups)[rank % groups]
                        if name == "gradient" and len({*map(len, every)}) == 1:
                            story = (
                                "the all-reduce goes over all ranks, not only those that hold the "
                                "same shard"
                            )
                            instead[story] = sum(every)
                        if name == "gradient":
                            instead["gradients are divided by the number of groups"] = (
                                every[rank % group] / groups
                            )
                        instead[f"the ranks of a group lie {groups} apart, not side by side"] = (
                            every[rank // groups]
                        )
                        instead["all ranks share out one replica"] = np.array_split(
                            np.concatenate(every), case.ranks
                        )[rank]
                    if name == "gradient":
                        instead["gradients are averaged over the ranks"] = (
                            every[rank % group] / case.ranks
                        )
                        if groups > 1:
                            instead["gradients are divided by the ranks of a group"] = (
                                every[rank % group] / group
                            )
                        alike = np.array_split(begun_alike(model, case, step)[unit], group)[
                            rank % group
                        ]
                        instead[
                            "backward of each unit begins with the gradient of the last output"
                        ] = alike
                        instead["each rank keeps its part of its own gradients"] = of_rank
                        instead["gradients are summed inside the group only"] = of_group
                        if step:
                            instead["the gradients of earlier steps are still in it"] = (
                                np.array_split(upto[-1][unit] + earlier[unit], group)[rank % group]
                            )
                        turned = np.array_split(upto[-1][-1 - unit], group)[rank % group]
                        if len(model) > 1:
                            instead[
                                "they come in the order of backward, those of the last module first"
                            ] = turned
                    what = f"step {step}: the {name} of unit {unit}"
                    expect_close(rank, what, found, every[rank % group], instead=instead)
            if left := int(result[f"gradients left {step}"]):
                raise Wrong(
                    f"rank {rank}: after backward {left} parameters still have a whole .grad, "
                    "expected None"
                )
        earlier = [old + new for old, new in zip(earlier, upto[-1], strict=True)]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
    expect_gathered_again(case, results, notes)
    most = MOST_WHOLE * sum(weight.nbytes for weight in parts(case.given[0])[0])
    for rank, result in enumerate(results):
        expect_free(
            rank,
            result,
            "the constructor",
            "forward",
            "backward",
            "the second forward",
            "the second backward",
        )
        held, gradients = map(int, result["most"])
        if held > most:
            said = (
                f"rank {rank} held {held} bytes of whole parameters at a time, expected at most "
                f"{most}"
            )
            raise Wrong(
                f"{said}: {held * MOST_WHOLE // most} units are whole at once, expected "
                f"{MOST_WHOLE} at most"
            )
        if gradients > MOST_WHOLE:
            raise Wrong(
                f"rank {rank} held whole gradients of {gradients} units at a time, expected "
                f"{MOST_WHOLE} at most: reduce those of a unit after its backward, and set them "
                "to None"
            )
    return {"peak bytes of whole parameters": max(int(result["most"][0]) for result in results)}


def expect_gathered_again(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Raise `Wrong` if units stay whole after forward, and backward has no need to gather them."""
    group = int(case.given[0]["sizes"][1]) or case.ranks
    group_of = np.arange(case.ranks) // group
    inside = group_of[:, None] == group_of
    forward, backward = (sent_between(results, notes, stage)[inside].sum() for stage in (0, 1))
    held, units = int(results[0]["held"][1]), parts(case.given[0])
    if len(units) > 1 and held == sum(weight.nbytes for weight in units[-1]):
        raise Wrong(
            f"rank 0: after forward whole parameters still have {held} bytes, expected 0: this is "
            "what comes out if the last module stays whole, as its backward comes next; release it "
            "after its forward, too: others may compute before"
        )
    if held and backward <= forward:
        raise Wrong(
            f"rank 0: after forward whole parameters still have {held} bytes, expected 0: this is "
            "what comes out if units stay whole until their backward and are gathered once; "
            "release each after its forward, and gather it again in backward"
        )


def partial_outputs(model: nn.Sequential, given: Arrays, step: int) -> dict[str, Array]:
    """Return what comes out of each unit before the last."""
    found, x = {}, torch.tensor(given["x"][step])
    with torch.no_grad():
        for unit, block in enumerate(model):
            found[f"it is the {'input' if not unit else 'output'} of unit {max(0, unit - 1)}"] = (
                x.numpy()
            )
            x = block(x)
    return found


def begun_alike(model: nn.Sequential, case: Case, step: int) -> list[Array]:
    """Return the summed gradients of each unit if each gets the gradient of the last output."""
    copy = nn.Sequential(
        *(Block([p.detach().numpy() for p in block.parameters()]) for block in model)
    )
    for given in case.given:
        x = torch.tensor(given["x"][step])
        for block in copy:
            x = block(x.detach())
            x.backward(torch.tensor(given["gradient"][step]))
    return [flat(p.grad for p in block.parameters()) for block in copy]

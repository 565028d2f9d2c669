"""Lesson 13: the judges of what the checks' programs found, in the grader's process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from minidist.course.grader.contract import (
    Array,
    Arrays,
    Case,
    Note,
    Wrong,
    expect_close,
    expect_equal,
    known,
    sent_by,
)

SEED = "draw it from the `generator` that is given, and from nothing else"
STEPS, RATE, DECAY = 3, 0.05, 0.1


def judge_lora(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Compute all of it with numpy."""
    for rank, (given, found) in enumerate(zip(case.given, results, strict=True)):
        W, A, B, alpha = (given[name] for name in ("weight", "A", "B", "alpha"))
        expect_equal(rank, "B at the start", found["drawn B"], np.zeros_like(B))
        if not np.array_equal(found["drawn A"], results[0]["drawn A"]):
            raise Wrong(
                f"rank {rank}: A at the start is not that of rank 0, whose generator has the same "
                f"seed: {SEED}"
            )
        root = A.shape[1] ** 0.5
        spread = (
            np.sqrt((found["drawn A"] ** 2).mean()) * root
            if found["drawn A"].shape == A.shape
            else 0
        )
        if not 0.4 < spread < 1.8:
            ways = {"it is 1/in": 1 / root, "it is 1": root, "it is 1/√out": root / len(W) ** 0.5}
            ways["it is 1/√rank"] = root / len(A) ** 0.5
            if not spread:
                ways = {"A is zero, as B is: then neither ever gets a gradient": 0.0}
            near = (
                min(ways, key=lambda clause: abs(np.log(spread / ways[clause])))
                if spread
                else next(iter(ways))
            )
            why = known(ways, ways.get(near).__eq__)
            says = (
                f"rank {rank}: A deviates by {spread:.3g}/√in, expected about 1/√in, drawn from "
                "the generator"
            )
            raise Wrong(says + why)
        start, scaled = given["x"] @ W.T + given["bias"], alpha / len(A)
        instead = {
            "alpha/rank also multiplies what the layer computes": scaled * start,
            "the layer's bias is left out": start - given["bias"],
            "the layer's bias counts twice": start + given["bias"],
            "only the adapter counts, and not the layer": 0 * start,
        }
        expect_close(
            rank, "the output at the start", found["output at the start"], start, instead=instead
        )
        if not found["frozen"].all() or found["trained"] != A.size + B.size:
            raise Wrong(
                f"rank {rank}: {found['trained']} numbers are trained, expected "
                f"{A.size + B.size}: A and B alone"
            )
        low, expected = len(A), adapted(given, alpha / len(A))
        others = {clause: adapted(given, scale) for clause, scale in scales(alpha, low).items()}
        others |= {clause: adapted(given, alpha / low, how) for how, clause in LORA_SLIPS.items()}
        others["merge changes the layer that was adapted"] = {
            "weight of the layer after merging": expected["merged weight"]
        }
        for name, value in expected.items():
            instead = {clause: wrong[name] for clause, wrong in others.items() if name in wrong}
            expect_close(rank, f"the {name}", found[name], value, instead=instead)
        if found["shared"]:
            raise Wrong(
                f"rank {rank}: the merged layer shares numbers with the one that was adapted: "
                "copy the bias, too"
            )
        if not found["plain"]:
            raise Wrong(f"rank {rank}: merge returned another module than a plain nn.Linear")
        if found["largest"] >= W.size:
            says = (
                f"rank {rank}: forward keeps a matrix of {found['largest']} numbers, as large as "
                "the weight"
            )
            raise Wrong(
                f"{says}: multiply x by A, and the result by B; A and B are never multiplied"
            )


def scales(alpha: float, low: int) -> dict[str, float]:
    """Return other scales than alpha/rank."""
    return {
        "the adapter is scaled by alpha, not by alpha/rank": alpha,
        "the adapter is not scaled": 1.0,
        "the adapter is scaled by 1/rank alone": 1 / low,
        "the adapter is scaled by rank/alpha": low / alpha,
        "the adapter is scaled by alpha/√rank; it is alpha/rank": alpha / low**0.5,
        "the adapter is scaled by alpha times rank": alpha * low,
        "the adapter is scaled by alpha/rank twice": (alpha / low) ** 2,
        "the adapter is subtracted": -alpha / low,
    }


def adapted(given: Arrays, scale: float, how: str = "") -> dict[str, Array]:
    """Return what task 1 finds if the adapter is scaled so; `how` is one of `LORA_SLIPS`."""
    W, A, B, x = (given[name] for name in ("weight", "A", "B", "x"))
    bias = given["bias"] * {"no bias": 0, "bias twice": 2}.get(how, 1)
    y = x @ W.T * (how != "no layer") + bias + scale * (x @ A.T) @ B.T
    back = {"layer alone": W, "adapter alone": scale * B @ A}.get(how, W + scale * B @ A)
    found = {"output": y, "gradient of x": 2 * y @ back}
    found |= {
        "gradient of A": 2 * scale * (y @ B).T @ x,
        "gradient of B": 2 * scale * y.T @ (x @ A.T),
    }
    merged = {"merges adapter": scale * B @ A, "merges layer": W}.get(how, W + scale * B @ A)
    output = x @ merged.T + given["bias"] * (how != "merges no bias")
    return found | {
        "merged weight": merged,
        "merged output": output,
        "weight of the layer after merging": W,
    }


LORA_SLIPS = {
    "no bias": "the layer's bias is left out",
    "bias twice": "the layer's bias counts twice",
    "no layer": "the layer itself is left out",
    "layer alone": "no gradient flows back to x through the adapter",
    "adapter alone": "no gradient flows back to x through the layer; its weight is frozen, not its input",
    "merges adapter": "merge forgets the weight of the layer",
    "merges layer": "merge forgets the adapter",
    "merges no bias": "the merged layer has no bias",
}


def judge_reduce(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each gradient is the sum; as many messages and bytes as one ring takes for so many
    numbers.
    """
    total, first = sum(given["x"].sum() for given in case.given), case.given[0]
    count, ranks = first["A"].size + first["B"].size, case.ranks
    frozen = 3 * (first["weight"].size + first["bias"].size)
    for rank, found in enumerate(results):
        for name in "AB":
            instead = {
                "gradients are averaged, not summed": first[name] * total / ranks,
                "they are as before": first[name] * case.given[rank]["x"].sum(),
                "the sum is added to the rank's own gradient; it replaces it": (
                    first[name] * (total + case.given[rank]["x"].sum())
                ),
                "they are summed twice": first[name] * total * ranks,
                "the values of the parameters are reduced, not their gradients": first[name]
                * ranks,
                "the sums are handed back in another order than that of the buffer": handed_back(
                    first, name, total
                ),
            }
            instead |= {
                f"they are those of rank {other} alone": first[name] * each["x"].sum()
                for other, each in enumerate(case.given)
            }
            expect_close(
                rank, f"the gradient of {name}", found[name], first[name] * total, instead=instead
            )
        expect_equal(rank, "a frozen weight", found["kept"], first["weight"])
        if not found["none"]:
            raise Wrong(f"rank {rank}: a frozen parameter has got a gradient")
        expected, messages = ring(count, ranks, rank), sent_by(rank, notes)
        each = [ring(first[name].size, ranks, rank) for name in "AB"]
        instead = {
            "what is frozen is sent, too": ring(count + frozen, ranks, rank),
            "each gradient has a ring of its own": (
                each[0][0] + each[1][0],
                each[0][1] + each[1][1],
            ),
        }
        if (sent := (len(messages), sum(note.bytes for note in messages))) != expected:
            says = (
                f"rank {rank} sent {sent} messages and bytes, expected {expected}: one ring of "
                f"{count} numbers"
            )
            raise Wrong(says + known(instead, sent.__eq__))


def handed_back(given: Arrays, name: str, total: float) -> Array:
    """Return the sum of one gradient if the buffer, A then B, is read as B then A."""
    flat, size = np.concatenate([given["A"].ravel(), given["B"].ravel()]) * total, given["B"].size
    return (flat[:size] if name == "B" else flat[size:]).reshape(given[name].shape)


def ring(count: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the messages and bytes that a rank sends in a ring all-reduce of so many float64."""
    lengths = [len(chunk) for chunk in np.array_split(np.empty(count), ranks)]
    return 2 * (ranks - 1), 8 * (2 * count - lengths[rank] - lengths[(rank + 1) % ranks])


def judge_offload(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Compare with torch's AdamW, and the order of fetching and keeping with the one that reads
    ahead by one.
    """
    for rank, (given, found) in enumerate(zip(case.given, results, strict=True)):
        parameters = [nn.Parameter(torch.from_numpy(start.copy())) for start in given["start"]]
        optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY)
        used = [number for number in range(len(parameters)) if number % 3 != 1]
        for step, gradients in enumerate(given["gradients"]):
            for number in used:
                parameters[number].grad = torch.from_numpy(gradients[number].copy())
            optimizer.step()
            for state in optimizer.state.values() if step == 0 else ():
                state["exp_avg_sq"] *= 4
                state["step"].zero_()
        orders = {
            "the next state is fetched after the update, and not before": in_order(used, ahead=0),
            "two states are read ahead": in_order(used, ahead=2),
            "all states are fetched first": in_order(used, ahead=len(used)),
            "states of parameters without a gradient are fetched, too": in_order(
                range(len(parameters)), ahead=1
            ),
            "states are numbered among the parameters that have a gradient": in_order(
                range(len(used)), ahead=1
            ),
        }
        expected = in_order(used, ahead=1)
        for step, log in enumerate(np.split(found["log"], found["until"][:-1])):
            if log.tolist() != expected:
                says = f"rank {rank}, step {step}: {words(log)}, expected {words(expected)}"
                raise Wrong(says + known(orders, log.tolist().__eq__))
        if len(late := found["late"]):
            raise Wrong(
                f"rank {rank}: state {late[0]} is fetched after the parameter before it was "
                "updated, expected before the update: so nothing comes while this one computes"
            )
        updated = np.array([p.detach().numpy() for p in parameters])
        instead = {clause: partial(adamw, given, used, how) for how, clause in SLIPS.items()}
        expect_close(rank, "parameter", found["parameters"], updated, 1e-10, instead=instead)
        for number in used:
            for name, value in optimizer.state[parameters[number]].items():
                expect_close(
                    rank, f"{name} of parameter {number}", found[name][number], value.numpy(), 1e-10
                )


def in_order(numbers: Sequence[int], ahead: int) -> list[int]:
    """Return who is fetched (2 n) and kept (2 n + 1), in order, if so many states are read
    ahead.
    """
    log = [2 * number for number in numbers[:ahead]]
    for place, number in enumerate(numbers):
        log += [2 * other for other in numbers[place + ahead : place + ahead + 1]]
        log.append(2 * number + 1)
    return log


SLIPS = {
    "gradient": "weight decay is added to the gradient, as in Adam with L2, and goes through the moments",
    "root": "eps is added inside of the root",
    "uncorrected": "the moments are not corrected by the number of steps",
    "m uncorrected": "m is not divided by 1 - β₁^step",
    "v uncorrected": "v is not divided by 1 - β₂^step",
    "remembered": "steps are counted on from call to call, whatever is in slow memory",
    "one step": "the moments are corrected as in a first step each time: step + 1 is not used, or does not go "
    "back",
    "step after": "the moments are corrected by one step too many",
    "no decay": "the weights do not decay",
    "decay last": "the weights decay after the update, not before it",
    "decay without lr": "the decay is not multiplied by lr",
    "decay twice": "the weights decay twice",
    "grows": "the weights grow where they should decay",
    "betas": "β₁ and β₂ are exchanged",
    "no root of v": "the root of v is not taken",
    "no m": "m is the gradient itself, without a mean",
    "no squares": "v is a mean of |g|, not of g²",
    "uphill": "the update is added, not subtracted",
    "no lr": "the update is not multiplied by lr",
    "no 1 - β₁": "the gradient enters m whole, not times 1 - β₁",
    "no 1 - β₂": "the square enters v whole, not times 1 - β₂",
    "fresh": "what is computed is not in the state that goes back, so each step begins from what was "
    "fetched before",
    "m fresh": "the new m is not in the state that goes back",
    "v fresh": "the new v is not in the state that goes back",
    "large eps": "eps is added to v and to its root",
    "old m": "the update takes m and v as they were before this gradient",
}


def adamw(given: Arrays, used: Sequence[int], how: str) -> Array:
    """Return the parameters after all steps, if something goes wrong: `how` is one of `SLIPS`."""
    weights, count = given["start"].copy(), 0
    w, mean, square = weights[used], 0.0, 0.0
    first, second = (0.999, 0.9) if how == "betas" else (0.9, 0.999)
    decay = {
        "decay without lr": 1 - DECAY,
        "grows": 1 + RATE * DECAY,
        "decay twice": (1 - RATE * DECAY) ** 2,
    }
    decay |= {"gradient": 1.0, "no decay": 1.0}
    for step, gradients in enumerate(given["gradients"]):
        g, count = gradients[used] + DECAY * w * (how == "gradient"), count + 1
        before = (mean, square, count - 1)
        mean = first * mean + (1 if how == "no 1 - β₁" else 1 - first) * g
        mean = g if how == "no m" else mean
        g = np.abs(g) ** 0.5 if how == "no squares" else g
        square = second * square + (1 if how == "no 1 - β₂" else 1 - second) * g**2
        m, v = before[:2] if how == "old m" else (mean, square)
        of = {"one step": 1, "step after": count + 1}.get(how, count)
        by = [1.0 if how in ("uncorrected", f"{name} uncorrected") else 1 - beta**of
              for name, beta in (("m", first), ("v", second))]  # fmt: skip
        root = np.sqrt(v / by[1] + 1e-8) if how == "root" else np.sqrt(v / by[1]) + 1e-8
        root = {
            "no root of v": v / by[1] + 1e-8,
            "large eps": np.sqrt(v / by[1] + 1e-8) + 1e-8,
        }.get(how, root)
        update = {"uphill": -RATE, "no lr": 1.0}.get(how, RATE) * m / by[0] / root
        kept = decay.get(how, 1 - RATE * DECAY)
        w = (w - update) * kept if how == "decay last" else w * kept - update
        mean = before[0] if how in ("fresh", "m fresh") else mean
        square = before[1] if how in ("fresh", "v fresh") else square
        count = before[2] if how == "fresh" else count
        if step == 0:  # the state is overwritten
            square, count = 4 * square, count if how == "remembered" else 0
    weights[used] = w
    return weights


def words(log: Sequence[int]) -> str:
    """Write down what happened."""
    return ", ".join(f"{'keep' if each % 2 else 'fetch'} {each // 2}" for each in log[:12])

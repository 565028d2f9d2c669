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

BELOW = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
LEVELS = np.array([*BELOW, 0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0])
STEPS, RATE, DECAY = 3, 0.05, 0.1


def judge_lora(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Compute all of it with numpy."""
    for rank, (given, found) in enumerate(zip(case.given, results, strict=True)):
        W, A, B, alpha = (given[name] for name in ("weight", "A", "B", "alpha"))
        expect_equal(rank, "B at the start", found["drawn B"], np.zeros_like(B))
        expect_equal(rank, "A at the start", found["drawn A"], results[0]["drawn A"])
        root = A.shape[1] ** 0.5
        spread = np.sqrt((found["drawn A"] ** 2).mean()) * root if found["drawn A"].shape == A.shape else 0
        if not 0.4 < spread < 1.8:
            why = known({"it is 1/in": 1 / root, "it is 1": root}, lambda value: 0.4 < spread / value < 1.8)  # noqa: B023
            says = f"rank {rank}: A deviates by {spread:.3g}/√in, expected about 1/√in, drawn from the generator"
            raise Wrong(says + why)
        start = given["x"] @ W.T + given["bias"]
        expect_close(rank, "the output at the start", found["output at the start"], start)
        if not found["frozen"].all() or found["trained"] != A.size + B.size:
            raise Wrong(
                f"rank {rank}: {found['trained']} numbers are trained, expected {A.size + B.size}: A and B alone"
            )
        others = {
            "the adapter is scaled by alpha, not by alpha/rank": adapted(given, alpha),
            "the adapter is not scaled": adapted(given, 1.0),
            "the adapter is scaled by 1/rank alone": adapted(given, 1 / len(A)),
        }
        expected = adapted(given, alpha / len(A))
        others["merge changes the layer that was adapted"] = {
            "weight of the layer after merging": expected["merged weight"]
        }
        for name, value in expected.items():
            instead = {clause: wrong[name] for clause, wrong in others.items() if name in wrong}
            expect_close(rank, f"the {name}", found[name], value, instead=instead)
        if found["shared"]:
            raise Wrong(
                f"rank {rank}: the merged layer shares numbers with the one that was adapted: copy the bias, too"
            )
        if not found["plain"]:
            raise Wrong(f"rank {rank}: merge returned another module than a plain nn.Linear")
        if found["largest"] >= W.size:
            says = f"rank {rank}: forward keeps a matrix of {found['largest']} numbers, as large as the weight"
            raise Wrong(f"{says}: multiply x by A, and the result by B; A and B are never multiplied")


def adapted(given: Arrays, scale: float) -> dict[str, Array]:
    """Return what task 1 finds if the adapter is scaled so."""
    W, A, B, x = (given[name] for name in ("weight", "A", "B", "x"))
    y = x @ W.T + given["bias"] + scale * (x @ A.T) @ B.T
    found = {"output": y, "gradient of x": 2 * y @ (W + scale * B @ A)}
    found |= {"gradient of A": 2 * scale * (y @ B).T @ x, "gradient of B": 2 * scale * y.T @ (x @ A.T)}
    return found | {"merged weight": W + scale * B @ A, "merged output": y, "weight of the layer after merging": W}


def judge_reduce(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each gradient is the sum; as many messages and bytes as one ring takes for so many numbers."""
    total, first = sum(given["x"].sum() for given in case.given), case.given[0]
    count, ranks = first["A"].size + first["B"].size, case.ranks
    frozen = 3 * (first["weight"].size + first["bias"].size)
    for rank, found in enumerate(results):
        for name in "AB":
            instead = {
                "gradients are averaged, not summed": first[name] * total / ranks,
                "they are as before": first[name] * case.given[rank]["x"].sum(),
            }
            expect_close(rank, f"the gradient of {name}", found[name], first[name] * total, instead=instead)
        expect_equal(rank, "a frozen weight", found["kept"], first["weight"])
        if not found["none"]:
            raise Wrong(f"rank {rank}: a frozen parameter has got a gradient")
        expected, messages = ring(count, ranks, rank), sent_by(rank, notes)
        each = [ring(first[name].size, ranks, rank) for name in "AB"]
        instead = {
            "what is frozen is sent, too": ring(count + frozen, ranks, rank),
            "each gradient has a ring of its own": (each[0][0] + each[1][0], each[0][1] + each[1][1]),
        }
        if (sent := (len(messages), sum(note.bytes for note in messages))) != expected:
            says = f"rank {rank} sent {sent} messages and bytes, expected {expected}: one ring of {count} numbers"
            raise Wrong(says + known(instead, sent.__eq__))


def ring(count: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the messages and bytes that a rank sends in a ring all-reduce of so many float64."""
    lengths = [len(chunk) for chunk in np.array_split(np.empty(count), ranks)]
    return 2 * (ranks - 1), 8 * (2 * count - lengths[rank] - lengths[(rank + 1) % ranks])


def judge_nf4(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Shapes and bytes; scales within their rule; each weight at its nearest level; what is packed can be read."""
    given, found = case.given[0], results[0]
    flat, count = given["weights"].ravel().astype("float64"), given["weights"].size
    for name in ("codes", "scales", "steps", "mean"):
        if (found[name].dtype, found[name].shape) != (given[name].dtype, given[name].shape):
            kind = f"{given[name].dtype} {given[name].shape}"
            raise Wrong(f"{name} are {found[name].dtype} {found[name].shape}, expected {kind}")
    if count % 2 and found["codes"][-1] & 15:
        raise Wrong(
            f"of {count} weights the last byte is {found['codes'][-1]:#04x}: its low four bits are of no weight, 0"
        )
    if not flat.any() and (astray := np.flatnonzero(found["codes"][: count // 2] != 0x77)).size:
        code = found["codes"][astray[0]] >> 4
        raise Wrong(f"all weights and scales are 0, and weight {2 * astray[0]} has the code {code}, expected 7")
    expect_scales(found, np.array([np.abs(flat[start : start + 64]).max() for start in range(0, count, 64)]))
    expect_codes(found, flat)
    reread = read(given, count).reshape(given["weights"].shape)
    expect_close(0, "dequantize of given codes", found["read"], reread, 1e-5)
    for each, bits in zip((count, 64, 100_000), found["bits"].tolist(), strict=True):
        codes, blocks, groups = -(-each // 2), -(-each // 64), -(-each // 64 // 256)
        expected = 8 * (codes + blocks + 4 * groups + 4) / each
        instead = {
            "the mean is not counted": expected - 32 / each,
            "the steps are not counted": expected - 32 * groups / each,
            "the codes alone are counted": 8 * codes / each,
            "the codes and scales alone are counted": 8 * (codes + blocks) / each,
            "it is the limit for many weights, with all blocks and groups full": 4 + 8 / 64 + 32 / 64 / 256,
        }
        if abs(bits - expected) > 1e-9:
            why = known(instead, lambda value: abs(value - bits) < 1e-9)  # noqa: B023
            raise Wrong(f"bits_per_weight({each}) is {bits:.6f}, expected {expected:.6f}{why}")


def expect_scales(found: Arrays, largest: Array) -> None:
    """Raise `Wrong` unless the mean, the steps and the scales are those of blocks with these largest |weights|."""
    far = np.abs(largest - largest.mean())
    steps = np.array([far[start : start + 256].max() for start in range(0, len(far), 256)]) / 127
    expect_close(0, "mean", found["mean"], largest.mean().reshape(1), 1e-5)
    instead = {"all groups have the step of the largest deviation of all": np.full(len(steps), far.max() / 127)}
    expect_close(0, "steps", found["steps"], steps, 1e-4, instead=instead)
    step = np.repeat(found["steps"], 256)[: len(far)]
    off = (read_scales(found) - largest) / np.where(step == 0, 1, step)
    if (wrong := np.flatnonzero((off < -1e-3) | (off > 1.001))).size:
        says = f"the scale of block {wrong[0]} lies {off[wrong[0]]:.3f} steps above its largest |weight|"
        ways = {"scale codes are rounded down, not up": 0.0, "scale codes are rounded to the nearest, not up": 0.5}
        raise Wrong(f"{says}, expected 0 to 1{known(ways, lambda most: off.max() <= most + 1e-3)}")


def expect_codes(found: Arrays, flat: Array) -> None:
    """Raise `Wrong` unless each weight has the code of the level that is nearest, by the scales as they are read."""
    count, scale = len(flat), np.repeat(read_scales(found), 64)[: len(flat)]
    most = np.abs(LEVELS * scale[:, None] - flat[:, None]).min(1) + 1e-6 * np.abs(flat).max()
    weights = read(found, count)
    if (wrong := np.flatnonzero(np.abs(weights - flat) > most)).size:
        swapped = read({**found, "codes": found["codes"] >> 4 | found["codes"] << 4}, count)
        largest = np.maximum.reduceat(np.abs(flat), range(0, count, 64)).repeat(64)[:count]
        by_largest = LEVELS[np.abs(LEVELS * largest[:, None] - flat[:, None]).argmin(1)] * scale
        instead = {
            "the earlier weight's code is in the low four bits": np.abs(swapped - flat) <= most,
            "a code is that of weight / largest, not of weight / scale": by_largest == weights,
            "weights are cut off to the level towards zero": np.abs(weights) <= np.abs(flat) + 1e-9,
        }
        says = f"weight {wrong[0]} is {flat[wrong[0]]:.6f} and is read as {weights[wrong[0]]:.6f}"
        raise Wrong(f"{says}: not the nearest level{known(instead, lambda fits: fits.mean() > 0.98)}")


def read_scales(packed: Arrays) -> np.ndarray:
    """Return the scales of all blocks."""
    steps = np.repeat(packed["steps"].astype("float64"), 256)[: len(packed["scales"])]
    return packed["scales"] * steps + packed["mean"]


def read(packed: Arrays, count: int) -> np.ndarray:
    """Return the weights of all codes."""
    codes = np.stack((packed["codes"] >> 4, packed["codes"] & 15), axis=1).ravel()[:count]
    return LEVELS[codes] * np.repeat(read_scales(packed), 64)[:count]


def judge_offload(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Compare with torch's AdamW, and the order of fetching and keeping with the one that reads ahead by one."""
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
            "states of parameters without a gradient are fetched, too": in_order(range(len(parameters)), ahead=1),
            "states are numbered among the parameters that have a gradient": in_order(range(len(used)), ahead=1),
        }
        expected = in_order(used, ahead=1)
        for step, log in enumerate(np.split(found["log"], found["until"][:-1])):
            if log.tolist() != expected:
                says = f"rank {rank}, step {step}: {words(log)}, expected {words(expected)}"
                raise Wrong(says + known(orders, log.tolist().__eq__))
        updated = np.array([p.detach().numpy() for p in parameters])
        instead = {clause: partial(adamw, given, used, how) for how, clause in SLIPS.items()}
        expect_close(rank, "parameter", found["parameters"], updated, 1e-10, instead=instead)
        for number in used:
            for name, value in optimizer.state[parameters[number]].items():
                expect_close(rank, f"{name} of parameter {number}", found[name][number], value.numpy(), 1e-10)


def in_order(numbers: Sequence[int], ahead: int) -> list[int]:
    """Return who is fetched (2 n) and kept (2 n + 1), in order, if so many states are read ahead."""
    log = [2 * number for number in numbers[:ahead]]
    for place, number in enumerate(numbers):
        log += [2 * other for other in numbers[place + ahead : place + ahead + 1]]
        log.append(2 * number + 1)
    return log


SLIPS = {
    "gradient": "weight decay is added to the gradient, as in Adam with L2, and goes through the moments",
    "root": "eps is added inside of the root",
    "uncorrected": "the moments are not corrected by the number of steps",
    "remembered": "steps are counted on from call to call, whatever is in slow memory",
    "no decay": "the weights do not decay",
}


def adamw(given: Arrays, used: Sequence[int], how: str) -> Array:
    """Return the parameters after all steps, if something goes wrong: `how` is one of `SLIPS`."""
    weights, count = given["start"].copy(), 0
    w, mean, square = weights[used], 0.0, 0.0
    for step, gradients in enumerate(given["gradients"]):
        g, count = gradients[used] + DECAY * w * (how == "gradient"), count + 1
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
        by, of = (1.0, 1.0) if how == "uncorrected" else (1 - 0.9**count, 1 - 0.999**count)
        root = np.sqrt(square / of + 1e-8) if how == "root" else np.sqrt(square / of) + 1e-8
        w = w * (1 if how in ("gradient", "no decay") else 1 - RATE * DECAY) - RATE * mean / by / root
        if step == 0:  # the state is overwritten
            square, count = 4 * square, count if how == "remembered" else 0
    weights[used] = w
    return weights


def words(log: Sequence[int]) -> str:
    """Write down what happened."""
    return ", ".join(f"{'keep' if each % 2 else 'fetch'} {each // 2}" for each in log[:12])

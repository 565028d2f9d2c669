"""Lesson 13: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minidist import Communicator
from minidist.course.grader.contract import Arrays, Case, Note, Wrong, expect_close, expect_equal, sent_by

BELOW = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
LEVELS = np.array([*BELOW, 0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0])
STEPS, RATE = 3, 0.05


def layer_of(given: Arrays) -> nn.Linear:
    """Return the layer that is to be adapted."""
    outputs, inputs = given["weight"].shape
    linear = nn.Linear(inputs, outputs, dtype=torch.float64, device="meta").to_empty(device="cpu")
    linear.weight.data.copy_(torch.from_numpy(given["weight"]))
    linear.bias.data.copy_(torch.from_numpy(given["bias"]))
    return linear


def run_lora(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1: look at the new adapter, then give it values, go forward and backward, and merge."""
    linear, low, alpha = layer_of(given), len(given["A"]), float(given["alpha"])
    adapted = exercise.adapt(linear, low, alpha, torch.Generator().manual_seed(int(given["seed"])))
    x = torch.from_numpy(given["x"].copy()).requires_grad_()
    found = {"drawn A": adapted.A.detach().numpy().copy(), "drawn B": adapted.B.detach().numpy().copy()}
    found["output at the start"] = adapted(x).detach().numpy()
    with torch.no_grad():
        adapted.A.copy_(torch.from_numpy(given["A"]))
        adapted.B.copy_(torch.from_numpy(given["B"]))
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = adapted(x)
    address = linear.weight.data_ptr()
    found["largest"] = max([tensor.numel() for tensor in saved if tensor.data_ptr() != address], default=0)
    y.square().sum().backward()
    found |= {"output": y.detach().numpy(), "gradient of x": x.grad.numpy()}
    found |= {f"gradient of {name}": getattr(adapted, name).grad.numpy() for name in "AB"}
    found["frozen"] = [parameter.grad is None and not parameter.requires_grad for parameter in linear.parameters()]
    found["trained"] = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    merged = exercise.merge(adapted)
    found |= {"plain": type(merged) is nn.Linear, "merged weight": merged.weight.detach().numpy()}
    mine = {parameter.data_ptr() for parameter in linear.parameters()}
    found["shared"] = any(parameter.data_ptr() in mine for parameter in merged.parameters())
    found["merged output"] = merged(x).detach().numpy()
    return found | {"weight of the layer after merging": linear.weight.detach().numpy()}


def run_reduce(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 on a model with frozen layers before, between and after the trained ones."""
    frozen = [layer_of(given).requires_grad_(False) for _ in range(3)]
    A, B = (nn.ParameterList([torch.from_numpy(given[name].copy())]) for name in "AB")
    model = nn.ModuleList([frozen[0], A, frozen[1], B, frozen[2]])
    for name, holder in (("A", A), ("B", B)):
        holder[0].grad = torch.from_numpy(given[name] * given["x"].sum())
    exercise.reduce_adapters(model, comm)
    found = {name: holder[0].grad.numpy() for name, holder in (("A", A), ("B", B))}
    return found | {
        "kept": frozen[0].weight.numpy(),
        "none": all(p.grad is None for f in frozen for p in f.parameters()),
    }


def run_nf4(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3."""
    count, shape = given["weights"].size, given["weights"].shape
    packed = exercise.quantize(torch.from_numpy(given["weights"].copy()))
    names = ("codes", "scales", "steps", "mean")
    found = {name: tensor.numpy() for name, tensor in zip(names, packed, strict=True)}
    found["read"] = exercise.dequantize(tuple(torch.from_numpy(given[name].copy()) for name in names), shape).numpy()
    return found | {"bits": [exercise.bits_per_weight(each) for each in (count, 64, 100_000)]}


class Slow:
    """A slow memory that writes down who came: 2n for fetching state n, 2n + 1 for bringing it back."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.log: list[int] = []
        zeros = [torch.zeros_like(parameter.detach()) for parameter in parameters]
        self.states = [{"step": torch.zeros(()), "exp_avg": zero, "exp_avg_sq": zero} for zero in zeros]

    def fetch(self, number: int) -> dict[str, Tensor]:
        """Return a copy."""
        self.log.append(2 * number)
        return {name: value.detach().clone() for name, value in self.states[number].items()}

    def keep(self, number: int, state: dict[str, Tensor]) -> None:
        """Take a copy back."""
        self.log.append(2 * number + 1)
        self.states[number] = {name: value.detach().clone() for name, value in state.items()}

    def overwrite(self) -> None:
        """Let all mean squares be four times as large, and no step done, as if somebody had loaded others."""
        for state in self.states:
            state["exp_avg_sq"], state["step"] = 4 * state["exp_avg_sq"], torch.zeros(())


def run_offload(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4 for some steps; state is overwritten after the first."""
    parameters = [nn.Parameter(torch.from_numpy(start.copy())) for start in given["start"]]
    slow, until = Slow(parameters), []
    for step, gradients in enumerate(given["gradients"]):
        for number, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            parameter.grad = None if number % 3 == 1 else torch.from_numpy(gradient.copy())
        exercise.offloaded_step(parameters, slow, lr=RATE, weight_decay=0.1)
        until.append(len(slow.log))
        if step == 0:
            slow.overwrite()
    found = {"parameters": [parameter.detach().numpy() for parameter in parameters], "log": slow.log, "until": until}
    return found | {
        name: np.array([s[name].numpy() for s in slow.states]) for name in ("step", "exp_avg", "exp_avg_sq")
    }


def judge_lora(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Compute all of it with numpy."""
    for rank, (given, found) in enumerate(zip(case.given, results, strict=True)):
        W, A, B, x, scale = *(given[name] for name in ("weight", "A", "B", "x")), given["alpha"] / len(given["A"])
        start, y = x @ W.T + given["bias"], x @ W.T + given["bias"] + scale * (x @ A.T) @ B.T
        expect_equal(rank, "B at the start", found["drawn B"], np.zeros_like(B))
        expect_equal(rank, "A at the start", found["drawn A"], results[0]["drawn A"])
        spread = np.sqrt((found["drawn A"] ** 2).mean() * A.shape[1]) if found["drawn A"].shape == A.shape else 0
        if not 0.4 < spread < 1.8:
            raise Wrong(f"rank {rank}: A deviates by {spread:.3g}/√in, expected about 1/√in, drawn from the generator")
        expect_close(rank, "the output at the start", found["output at the start"], start)
        if not found["frozen"].all() or found["trained"] != A.size + B.size:
            raise Wrong(
                f"rank {rank}: {found['trained']} numbers are trained, expected {A.size + B.size}: A and B alone"
            )
        expected = {"output": y, "gradient of x": 2 * y @ (W + scale * B @ A)}
        expected |= {"gradient of A": 2 * scale * (y @ B).T @ x, "gradient of B": 2 * scale * y.T @ (x @ A.T)}
        expected |= {"merged weight": W + scale * B @ A, "merged output": y, "weight of the layer after merging": W}
        for name, value in expected.items():
            expect_close(rank, f"the {name}", found[name], value)
        if found["shared"]:
            raise Wrong(
                f"rank {rank}: the merged layer shares numbers with the one that was adapted: copy the bias, too"
            )
        if not found["plain"]:
            raise Wrong(f"rank {rank}: merge returned another module than a plain nn.Linear")
        if found["largest"] >= W.size:
            raise Wrong(f"rank {rank}: forward keeps a matrix of {found['largest']} numbers, as large as the weight")


def judge_reduce(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each gradient is the sum; as many messages and bytes as one ring takes for so many numbers."""
    total, first = sum(given["x"].sum() for given in case.given), case.given[0]
    count, ranks = first["A"].size + first["B"].size, case.ranks
    lengths = [len(chunk) for chunk in np.array_split(np.empty(count), ranks)]
    for rank, found in enumerate(results):
        for name in "AB":
            expect_close(rank, f"the gradient of {name}", found[name], first[name] * total)
        expect_equal(rank, "a frozen weight", found["kept"], first["weight"])
        if not found["none"]:
            raise Wrong(f"rank {rank}: a frozen parameter has got a gradient")
        messages = sent_by(rank, notes)
        expected = (2 * (ranks - 1), 8 * (2 * count - lengths[rank] - lengths[(rank + 1) % ranks]))
        if (sent := (len(messages), sum(note.bytes for note in messages))) != expected:
            raise Wrong(f"rank {rank} sent {sent} messages and bytes, expected {expected}: one ring of {count} numbers")


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
    largest = np.array([np.abs(flat[start : start + 64]).max() for start in range(0, count, 64)])
    far = np.abs(largest - largest.mean())
    steps = np.array([far[start : start + 256].max() for start in range(0, len(far), 256)]) / 127
    expect_close(0, "mean", found["mean"], largest.mean().reshape(1), 1e-5)
    expect_close(0, "steps", found["steps"], steps, 1e-4)
    step, scales = np.repeat(found["steps"], 256)[: len(far)], read_scales(found)
    off = (scales - largest) / np.where(step == 0, 1, step)
    if (wrong := np.flatnonzero((off < -1e-3) | (off > 1.001))).size:
        raise Wrong(
            f"the scale of block {wrong[0]} lies {off[wrong[0]]:.3f} steps above its largest |weight|, expected 0 to 1"
        )
    scale = np.repeat(scales, 64)[:count]
    best = np.abs(LEVELS * scale[:, None] - flat[:, None]).min(1)
    error = np.abs(read(found, count) - flat)
    if (wrong := np.flatnonzero(error > best + 1e-6 * largest.max())).size:
        where = wrong[0]
        raise Wrong(
            f"weight {where} is {flat[where]:.6f} and is read as {read(found, count)[where]:.6f}: not the nearest level"
        )
    expect_close(
        0, "dequantize of given codes", found["read"], read(given, count).reshape(given["weights"].shape), 1e-5
    )
    for each, bits in zip((count, 64, 100_000), found["bits"].tolist(), strict=True):
        blocks = -(-each // 64)
        expected = 8 * (-(-each // 2) + blocks + 4 * -(-blocks // 256) + 4) / each
        if abs(bits - expected) > 1e-9:
            raise Wrong(f"bits_per_weight({each}) is {bits:.6f}, expected {expected:.6f}")


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
        optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.1)
        used = [number for number in range(len(parameters)) if number % 3 != 1]
        for step, gradients in enumerate(given["gradients"]):
            for number in used:
                parameters[number].grad = torch.from_numpy(gradients[number].copy())
            optimizer.step()
            for state in optimizer.state.values() if step == 0 else ():
                state["exp_avg_sq"] *= 4
                state["step"].zero_()
        order = [2 * used[0]]
        for now, following in pairwise(used):
            order += [2 * following, 2 * now + 1]
        expected = [*order, 2 * used[-1] + 1]
        for step, log in enumerate(np.split(found["log"], found["until"][:-1])):
            if log.tolist() != expected:
                raise Wrong(f"rank {rank}, step {step}: {words(log)}, expected {words(expected)}")
        expect_close(rank, "parameter", found["parameters"], np.array([p.detach().numpy() for p in parameters]), 1e-10)
        for number in used:
            for name, value in optimizer.state[parameters[number]].items():
                expect_close(rank, f"{name} of parameter {number}", found[name][number], value.numpy(), 1e-10)


def words(log: Sequence[int]) -> str:
    """Write down what happened."""
    return ", ".join(f"{'keep' if each % 2 else 'fetch'} {each // 2}" for each in log[:12])

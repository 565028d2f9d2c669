"""Lesson 10, task 3: the judge of a backward in two halves, and what comes out of it by mistake."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, expect_close


def judge_split(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Autograd's gradients; one product a layer in each half; what is kept between them."""
    given, result = case.given[0], results[0]
    x = torch.tensor(given["x"], requires_grad=True)
    names = [name for name in given if name.startswith("weight")]
    weights = {name: torch.tensor(given[name], requires_grad=True) for name in names}
    y, passed = x, [x]
    for weight in weights.values():
        y = torch.tanh(y @ weight.T)
        y.retain_grad()
        passed.append(y)
    y.backward(torch.tensor(given["gradient"]))
    if result["changed"].any():
        what = ("weights",) * len(names) + ("activations",) * len(passed) + ("gradient",)
        raise Wrong(
            f"backward_for_inputs changes the {what[int(result['changed'].argmax())]} that it is "
            "given"
        )
    mistaken = known_mistakes(weights, passed)
    for story, values in other_backwards(
        list(weights.values()), passed, torch.tensor(given["gradient"])
    ).items():
        for name, value in zip(("x", *names), values, strict=True):
            mistaken.setdefault(name, {})[story] = value.numpy()
    for name, leaf in {"x": x, **weights}.items():
        if name not in result:
            raise Wrong(f"backward_for_weights gave no gradient of {name}")
        assert leaf.grad is not None
        expect_close(
            0,
            f"the gradient of {name}",
            result[name],
            leaf.grad.numpy(),
            instead=mistaken.get(name),
        )
    halves = zip(
        ("backward_for_inputs", "backward_for_weights"), result["work"].tolist(), strict=True
    )
    for half, found in halves:
        if found != len(names):
            raise Wrong(
                f"{half} does {found} matrix products for {len(names)} layers, expected one for "
                "each"
            )
    kept = sum(8 * len(given["x"]) * sum(weight.shape) for weight in weights.values())
    if result["kept"] != kept:
        raise Wrong(
            f"the pairs hold {result['kept']} bytes, expected {kept}: an input and a gradient for "
            "each layer"
        )


# by story, of y = tanh(a), from y and the gradient
SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh's derivative is taken for 1 - y, not 1 - y²": lambda y, g: g * (1 - y),
    "tanh is applied once more before it is derived": lambda y, g: g * (1 - y.tanh() ** 2),
    "tanh's derivative is taken for y (1 - y), that of a sigmoid": lambda y, g: g * y * (1 - y),
    "tanh's derivative is taken for 1 + y²": lambda y, g: g * (1 + y**2),
    "tanh's derivative is taken for y² - 1": lambda y, g: g * (y**2 - 1),
    "tanh's derivative is taken for 1/(1 + y²), that of an arctangent": lambda y, g: g / (1 + y**2),
    "tanh is taken for its derivative": lambda y, g: g * y,
    "the gradient is divided by tanh's derivative": lambda y, g: g / (1 - y**2),
}


def other_backwards(
    weights: Sequence[Tensor], passed: Sequence[Tensor], seed: Tensor
) -> dict[str, list[Tensor]]:
    """Return by mistake the gradient of x, then those of the weights."""
    found = {}
    rows = len(seed)
    with torch.no_grad():
        right: list[tuple[Tensor, Tensor]] = []
        for story, slope in {"": lambda y, g: g * (1 - y**2), **SLOPES}.items():
            gradient, pairs = seed, list[tuple[Tensor, Tensor]]()
            for layer in reversed(range(len(weights))):
                before = slope(passed[layer + 1], gradient)
                pairs.insert(0, (passed[layer], before))
                behind, gradient = gradient, before @ weights[layer]
            products = [before.T @ x for x, before in pairs]
            if story:
                found[story] = [gradient, *products]
            else:
                right, of_x, of_first = pairs, gradient, behind
        gradient, pairs = seed, list[tuple[Tensor, Tensor]]()
        for layer in reversed(range(len(weights))):
            pairs.insert(0, (passed[layer], gradient))
            gradient = gradient @ weights[layer] * (1 - passed[layer] ** 2)
        found[
            "tanh's slope is taken at the input of a layer, behind its weight; it is that of its "
            "output, before the weight"
        ] = [gradient, *(before.T @ x for x, before in pairs)]
        products = [before.T @ x for x, before in right]
        found |= {
            "the mean over the rows is taken, not the sum": [
                of_x / rows,
                *(each / rows for each in products),
            ],
            "the sign is turned": [-of_x, *(-each for each in products)],
            "the pairs hold a layer's output, not its input": [
                of_x,
                *(before.T @ passed[layer + 1] for layer, (_, before) in enumerate(right)),
            ],
            "rows are summed before they are multiplied": [
                of_x,
                *(torch.outer(b.sum(0), x.sum(0)) for x, b in right),
            ],
            "the last product, with the first layer's weight, is left out": [
                right[0][1],
                *products,
            ],
            "the gradient of the last layer's argument is returned": [right[-1][1], *products],
            "the gradient of the output is returned as it came": [seed, *products],
            "the first layer is left out, and the gradient of what it gives is returned": [
                of_first,
                *products,
            ],
        }
    return found


def known_mistakes(
    weights: dict[str, Tensor], passed: Sequence[Tensor]
) -> dict[str, dict[str, Array]]:
    """Return, by weight, what comes out if tanh's derivative is left out: of the pairs only, or
    everywhere.
    """
    found, flowing = {}, passed[-1].grad
    for number, (name, weight) in reversed(list(enumerate(weights.items()))):
        x, gradient = passed[number].detach(), passed[number + 1].grad
        assert gradient is not None and flowing is not None and weight.grad is not None
        found[name] = {
            "the pairs hold the gradient for tanh's result, not for what it was applied to": (
                gradient.T @ x
            ).numpy(),
            "tanh's derivative is left out": (flowing.T @ x).numpy(),
            "x and the gradient change places": weight.grad.T.numpy(),
        }
        flowing = flowing @ weight.detach()
        found["x"] = {"tanh's derivative is left out": flowing.numpy()}
        other = list(weights.values())[len(weights) - 1 - number].grad
        if other is not None and other is not weight.grad:
            found[name]["the pairs stand from the last layer to the first"] = other.numpy()
    return found

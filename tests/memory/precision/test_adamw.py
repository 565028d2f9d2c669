"""FusedAdamW: torch's numbers and torch's state, however the parameters lie in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minidist.full.precision import adamw
from minidist.full.precision.adamw import FusedAdamW

SIZES = (5, 0, 17, 1, 40, 0, 3)
Make = Callable[[torch.dtype], list[nn.Parameter]]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def shards(dtype: torch.dtype) -> list[nn.Parameter]:
    """Slices of one flat buffer, some of them empty."""
    return [nn.Parameter(part) for part in numbers(sum(SIZES), dtype=dtype).split(SIZES)]


def separate(dtype: torch.dtype) -> list[nn.Parameter]:
    """Of all shapes, one not contiguous, one a scalar, one with no elements."""
    shapes = [(3, 4), (), (7,), (0,), (2, 3, 5)]
    tensors = [numbers(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    return [
        nn.Parameter(tensor)
        for tensor in (*tensors, numbers(6, 5, dtype=dtype).T, numbers(8, 6, dtype=dtype)[:, ::2])
    ]


def holed(dtype: torch.dtype) -> list[nn.Parameter]:
    """Slices of one buffer with a gap between two, and two in the wrong order; the last is of
    another buffer.
    """
    flat, other = numbers(40, dtype=dtype), numbers(40, seed=1, dtype=dtype)
    return [
        nn.Parameter(part)
        for part in (flat[:10], flat[10:18], flat[20:25], flat[35:], flat[25:35], other[35:])
    ]


def one_gradient_buffer(parameters: list[nn.Parameter], step: int) -> None:
    sizes = [parameter.numel() for parameter in parameters]
    flat = numbers(sum(sizes), seed=step + 50, dtype=parameters[0].dtype)
    for parameter, part in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = part.view(parameter.shape)


def separate_gradients(parameters: list[nn.Parameter], step: int) -> None:
    one_gradient_buffer(parameters, step)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone()


def some_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """Another parameter stays without a gradient at each step, so soon no two are of the same
    age.
    """
    one_gradient_buffer(parameters, step)
    parameters[step % len(parameters)].grad = None


def two_groups(parameters: list[nn.Parameter]) -> list[dict[str, object]]:
    return [
        {"params": parameters[:3]},
        {"params": parameters[3:], "weight_decay": 0.0, "lr": 0.1, "betas": (0.8, 0.9)},
    ]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("make", (shards, separate, holed))
@pytest.mark.parametrize("give", (one_gradient_buffer, separate_gradients, some_gradients))
@pytest.mark.parametrize("block", (4, adamw.BLOCK))
def test_the_numbers_are_torchs(
    make: Make,
    give: Callable[[list[nn.Parameter], int], None],
    dtype: torch.dtype,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adamw, "BLOCK", block)
    ours, theirs = make(dtype), make(dtype)
    pairs = (
        (ours, FusedAdamW(two_groups(ours), lr=0.03, weight_decay=0.1)),
        (theirs, torch.optim.AdamW(two_groups(theirs), lr=0.03, weight_decay=0.1, foreach=False)),
    )
    for step in range(9):
        for parameters, optimizer in pairs:
            give(parameters, step)
            optimizer.param_groups[0]["lr"] = 0.03 / (step + 1)
            optimizer.step()
    tolerance = (
        {"rtol": 1e-12, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 2e-6, "atol": 5e-7}
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            mine, others = pairs[0][1].state[a].get(name), pairs[1][1].state[b].get(name)
            torch.testing.assert_close(mine, others, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", (shards, separate))
@pytest.mark.parametrize(
    "classes", ((FusedAdamW, torch.optim.AdamW), (torch.optim.AdamW, FusedAdamW))
)
def test_the_state_can_be_handed_over(
    make: Make, classes: tuple[type[torch.optim.Optimizer], ...]
) -> None:
    ours, theirs = make(torch.float64), make(torch.float64)
    first = classes[0](ours, lr=0.03)  # type: ignore[call-arg]
    whole = torch.optim.AdamW(theirs, lr=0.03)
    for step in range(4):
        for parameters, optimizer in ((ours, first), (theirs, whole)):
            one_gradient_buffer(parameters, step)
            optimizer.step()
        if step == 1:
            second = classes[1](ours, lr=7.0)  # type: ignore[call-arg]
            second.load_state_dict(copy.deepcopy(first.state_dict()))
            first = second
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_options_that_are_not_offered_are_refused() -> None:
    parameters = shards(torch.float32)
    state = torch.optim.AdamW(parameters, amsgrad=True).state_dict()
    optimizer = FusedAdamW(parameters)
    optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="amsgrad=True"):
        optimizer.step()
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        FusedAdamW(parameters, lr=-1)


def test_moments_can_be_written_as_safetensors(tmp_path: Path) -> None:
    parameters = shards(torch.float32)
    one_gradient_buffer(parameters, 0)
    optimizer = FusedAdamW(parameters)
    optimizer.step()
    moments = {
        str(index): state["exp_avg"] for index, state in optimizer.state_dict()["state"].items()
    }
    save_file(moments, tmp_path / "moments.safetensors")
    found = load_file(tmp_path / "moments.safetensors")
    assert found.keys() == moments.keys() and all(
        torch.equal(found[name], moments[name]) for name in moments
    )
    assert all(moment.any() for moment in moments.values() if moment.numel())


def test_a_closure_is_called_with_gradients_on() -> None:
    (parameter, *_) = parameters = shards(torch.float64)
    optimizer = FusedAdamW(parameters)

    def closure() -> Tensor:
        loss = parameter.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    before = float(parameter.detach().square().sum())
    assert (
        float(optimizer.step(closure).detach()) == before > float(parameter.detach().square().sum())
    )

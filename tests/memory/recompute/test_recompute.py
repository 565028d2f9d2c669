"""Recomputation: the bits of the stored run, also inside strategies, and the bytes that they
promise.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import minidist
from minidist.full import DDP
from minidist.full.comm import Communicator
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.full.model.gpt import Layer
from minidist.full.recompute.segments import best_interval, checkpoint, measure_block, recompute

SMALL = GPTConfig(
    vocabulary=19,
    layers=5,
    hidden=16,
    heads=4,
    key_value_heads=2,
    sequence=8,
    tied=True,
    dropout=0.3,
)
NESTED = (0, ((1, (2,)), 3), 4)
POLICIES = ("none", "full", "selective", "every 2", "every 5", "sqrt", NESTED)


def batch(rows: int = 3, seed: int = 0) -> Tensor:
    return torch.randint(19, (rows, 9), generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, tokens: Tensor) -> None:
    cross_entropy_sum(model(tokens[:, :-1], Where(seed=5, step=2)), tokens[:, 1:]).backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in theirs
    )


class TorchDropout(nn.Module):
    """A stack of blocks that draw from the global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(6, 6), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.2), nn.Linear(6, 6)
            )
            for _ in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# ---- the same bits ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_gradients_of_the_gpt(policy: Any, dtype: torch.dtype) -> None:
    stored, again = GPT(SMALL, dtype=dtype), GPT(SMALL, dtype=dtype)
    recompute(again, policy)
    assert list(again.state_dict()) == list(stored.state_dict())
    for tokens in (batch(), batch(2, seed=1)):  # gradients add up
        step(stored, tokens)
        step(again, tokens)
    assert same_bits(gradients(again), gradients(stored))


@pytest.mark.parametrize(
    "policy", [policy for policy in POLICIES if policy != "selective"], ids=str
)
def test_torchs_dropout_draws_the_same_again_and_what_follows_draws_as_if_nothing_had_been(
    policy: Any,
) -> None:
    torch.manual_seed(0)
    stored, again = TorchDropout(), TorchDropout()
    again.load_state_dict(stored.state_dict())
    recompute(again, policy)
    results = []
    for model in (stored, again):
        torch.manual_seed(7)
        loss = model(torch.ones(4, 6)).square().sum()
        between = torch.rand(3)
        loss.backward()
        results.append((loss.detach(), between, torch.rand(3)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert same_bits(gradients(again), gradients(stored))


Function = Callable[..., Any]


def many(
    weight: Tensor, pair: tuple[Tensor, Tensor], scale: float, *, table: dict[str, Any]
) -> tuple[Any, ...]:
    """Many inputs, many outputs: one without gradient, one no tensor, one nobody uses."""
    first = (pair[0] @ weight * scale).relu_()
    second = torch.sin(pair[1] * table["tensor"] + table["number"]) * first
    return first, {"second": second.exp()}, second.argmax(), "a word", torch.tanh(second)


@pytest.mark.parametrize("nesting", [1, 2, 3])
def test_several_inputs_and_outputs_tuples_keywords_and_captured_tensors(nesting: int) -> None:
    results = []
    for depth in (0, nesting):
        draws = torch.Generator().manual_seed(0)
        tensors = [torch.randn(4, 4, generator=draws, requires_grad=True) for _ in range(4)]
        captured = tensors[3].exp()  # not a leaf, and not an argument

        def function(*args: Any, captured: Tensor = captured, **kwargs: Any) -> Any:
            first, rest, *others = many(*args, **kwargs)
            return first * captured, rest, *others

        call: Function = function
        for _ in range(depth):
            call = partial(checkpoint, call)
        weight, left, right, _ = tensors
        table = {"tensor": torch.full((4,), 2.0), "number": 3}
        first, rest, index, word, _ = call(weight, (left.sin(), right), 0.5, table=table)
        assert word == "a word" and not index.requires_grad
        (first.sum() + rest["second"].square().sum()).backward()
        results.append([tensor.grad for tensor in tensors])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_second_derivatives_and_a_graph_that_is_kept() -> None:
    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return torch.tanh(weight @ x).exp()

    results = []
    for run in (
        function,
        partial(checkpoint, function),
        partial(checkpoint, partial(checkpoint, function)),
    ):
        loss = run(x).sum()
        once = torch.autograd.grad(loss, (x, weight), retain_graph=True)
        slope = torch.autograd.grad(loss, (x, weight), create_graph=True)
        twice = torch.autograd.grad(slope[0].square().sum() + slope[1].sin().sum(), (x, weight))
        results.append([*once, *slope, *twice])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_autocast_is_the_same_again() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(3, 8)
    found = []
    for run in (model, partial(checkpoint, model)):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run(x).float().square().sum()
        loss.backward()
        found.append(gradients(model))
    assert same_bits(*found)


# ---- inside strategies ----


@pytest.mark.parametrize("policy", ["full", "every 2", NESTED], ids=str)
def test_inside_ddp_each_parameter_is_reduced_once_and_hooked_once(policy: Any) -> None:
    """`DDP` raises if a second gradient comes for a parameter, or if backward seems to end
    early.
    """

    def program(comm: Communicator) -> tuple[dict[str, Tensor], list[int]]:
        model = GPT(SMALL, dtype=torch.float64)
        recompute(model, policy)
        wrapped = DDP(model, comm, op="sum", bucket_bytes=4096, first_bucket_bytes=512)
        calls = {name: 0 for name, _ in model.named_parameters()}

        def count(gradient: Tensor, name: str) -> Tensor:
            calls[name] += 1
            return gradient * 2

        for name, parameter in model.named_parameters():
            parameter.register_hook(partial(count, name=name))
        step(wrapped, batch(seed=comm.rank))
        return {name: gradient / 2 for name, gradient in gradients(model).items()}, list(
            calls.values()
        )

    stored = GPT(SMALL, dtype=torch.float64)
    step(stored, batch(seed=0))
    step(stored, batch(seed=1))
    expected = gradients(stored)
    for found, calls in minidist.run(program, 2):
        assert set(calls) == {1}
        assert all(
            torch.allclose(found[name], expected[name], rtol=1e-12, atol=1e-14) for name in expected
        )


@pytest.mark.parametrize("policy", ["full", "every 2", NESTED], ids=str)
def test_parameters_that_are_freed_after_each_use_and_filled_again_before(policy: Any) -> None:
    """As ZeRO-3 does: hooks of each linear layer gather its weight, and let its storage go."""
    stored, freed = GPT(SMALL), GPT(SMALL)
    units = [
        module
        for module in freed.modules()
        if isinstance(module, nn.Linear) and module is not freed.head
    ]
    whole = {unit: unit.weight.detach().clone() for unit in units}

    def gather(unit: nn.Module, *_: object) -> None:
        storage = unit.weight.untyped_storage()
        if not storage.nbytes():
            storage.resize_(whole[unit].nbytes)
            with torch.no_grad():
                unit.weight.copy_(whole[unit])  # the version goes up: plain autograd would object

    def free(unit: nn.Module, *_: object) -> None:
        unit.weight.untyped_storage().resize_(0)

    for unit in units:
        unit.register_forward_pre_hook(gather)
        unit.register_forward_hook(free)
        unit.register_full_backward_pre_hook(gather)
        unit.weight.register_post_accumulate_grad_hook(partial(lambda unit, *_: free(unit), unit))
    recompute(freed, policy)
    nonrecomputed = {0, 4} if policy == NESTED else set()
    for index in nonrecomputed:  # stored blocks hold the weights themselves: nothing to show here
        for unit in freed.layers[index].modules():
            unit._forward_hooks.clear()
    step(stored, batch())
    step(freed, batch())
    assert same_bits(gradients(freed), gradients(stored))


# ---- bytes ----


class Meter(TorchDispatchMode):
    """Bytes of all storages alive, made since it was entered: the most at any end of a (second)
    forward.

    Then a graph holds all that it will; gradients are in flight, temporaries are not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak, self.forward = 0, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.forward and not torch.is_grad_enabled():
            self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
            self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        self.forward = torch.is_grad_enabled()
        result = func(*args, **(kwargs or {}))
        inputs = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, Tensor)}
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in inputs:
                reference = StorageWeakRef(tensor.untyped_storage())
                self.alive[reference.cdata] = (reference, tensor.untyped_storage().nbytes())
        return result


TWELVE = GPTConfig(vocabulary=8, layers=12, hidden=64, heads=4, sequence=64)


def block_sizes() -> tuple[int, int]:
    model, x = GPT(TWELVE), torch.randn(8, 64, 64)
    return measure_block(model.layers[0], x, model.rotary(torch.arange(64), x.dtype), Where())


class TorchSegments(nn.ModuleList):
    """Segments of k blocks, by the oracle."""

    k = 1

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), self.k):
            yield partial(
                torch_checkpoint,
                nn_sequence([self[i] for i in range(start, start + self.k)]),
                use_reentrant=False,
            )


def nn_sequence(blocks: list[nn.Module]) -> Function:
    def run(x: Tensor, *args: Any) -> Tensor:
        for block in blocks:
            x = block(x, *args)
        return x

    return run


@cache
def peak(policy: str, oracle: int = 0) -> int:
    model = GPT(TWELVE)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if oracle:
        model.layers = TorchSegments(model.layers)
        model.layers.k = oracle
    else:
        recompute(model, policy, sizes=block_sizes())
    tokens = torch.zeros(8, 64, dtype=torch.int64)
    gc.disable()  # what is needed no more goes by itself, or is counted
    try:
        with Meter() as meter:
            model(tokens).sum().backward()
    finally:
        gc.enable()
    return meter.peak


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 12])
def test_bytes_held_are_those_of_the_formula_and_no_more_than_torchs(k: int) -> None:
    c, activations = block_sizes()
    ours = peak(f"every {k}")
    assert ours == pytest.approx(k * activations + 12 // k * c, rel=0.02)
    assert ours <= peak("", oracle=k)


def test_sqrt_is_the_best_interval() -> None:
    c, activations = block_sizes()
    assert c == 8 * 64 * 64 * 4 and 15 * c < activations < 25 * c
    assert peak("sqrt") <= min(peak(f"every {k}") for k in range(1, 13))
    assert peak("full") < 0.2 * peak("none")
    assert [best_interval(layers, 1, 1) for layers in (1, 4, 9, 16, 100)] == [1, 2, 3, 4, 10]
    assert best_interval(96, 10, 1) > best_interval(96, 1, 1) > best_interval(96, 1, 10)
    costs = [k * 3 + -(-17 // k) * 10 for k in range(1, 18)]
    assert costs[best_interval(17, 10, 3) - 1] == min(costs)


def test_nothing_outlives_backward() -> None:
    x = torch.randn(8, requires_grad=True)
    hidden = x.exp()
    reference = weakref.ref(hidden)
    loss = checkpoint(torch.sin, hidden).sum()
    del hidden
    assert reference() is not None
    loss.backward()
    assert reference() is None


def test_what_nobody_will_ask_for_is_not_kept() -> None:
    """The graph of an output that was dropped is gone: its tensors are counted in the second run,
    not kept.
    """
    made: list[StorageWeakRef] = []

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        used, unused = x.exp(), x.sin().exp()
        made[:] = [StorageWeakRef(tensor.untyped_storage()) for tensor in (used, unused)]
        return used.tanh(), unused.tanh()

    x = torch.ones(8, requires_grad=True)
    loss = checkpoint(function, x)[0].sum()
    loss.backward(retain_graph=True)
    assert all(reference.expired() for reference in made)
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().tanh().sum(), x)[0])


def test_a_second_run_ends_with_the_last_tensor_that_backward_needs() -> None:
    """So the last product of a block is not computed again: backward needs its inputs alone."""
    reached: list[str] = []

    def block(x: Tensor, weight: Tensor) -> Tensor:
        bent = x.sin()
        reached.append("sine")
        product = bent @ weight
        reached.append("product")
        return product

    x, weight = (torch.ones(3, 3, requires_grad=True) for _ in range(2))
    product = checkpoint(block, x, weight)
    assert reached == ["sine", "product"]
    product.sum().backward()
    assert reached == ["sine", "product", "sine"]


def test_a_function_that_catches_everything_gets_the_same_gradient() -> None:
    """It catches what ends the second run, too."""

    def function(x: Tensor) -> Tensor:
        try:
            return x.exp().sin()
        except BaseException:
            return x.cos()

    x = torch.ones(3, requires_grad=True)
    checkpoint(function, x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(function(x).sum(), x)[0])


def test_an_exception_in_the_second_run_leaves_everything_as_it_was() -> None:
    outcomes = iter([False, True, False])

    def function(x: Tensor) -> Tensor:
        y = nn.functional.dropout(x).exp()
        if next(outcomes):
            raise ZeroDivisionError
        return y.sin()

    x = torch.ones(30, requires_grad=True)
    loss = checkpoint(function, x).sum()
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert x.sin().grad_fn._saved_self is not None, "no hook is left"  # type: ignore[union-attr]
    loss.backward()
    assert x.grad is not None


def test_nothing_of_a_second_run_that_failed_is_used() -> None:
    turns = iter([(1, 3), (5, 2), (1, 3)])

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        factor, size = next(turns)
        return (x * factor).exp(), x[:size].tanh()

    x = torch.ones(3, requires_grad=True)
    outputs = checkpoint(function, x)
    with pytest.raises(RuntimeError, match="when run again"):
        outputs[0].sum().backward(retain_graph=True)
    outputs[0].sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_backward_inside_the_function() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.exp().sin()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y * slope.tanh()

    found = []
    for run in (
        function,
        partial(checkpoint, function),
        partial(checkpoint, partial(checkpoint, function)),
    ):
        x = torch.linspace(0, 1, 5, requires_grad=True)
        run(x).sum().backward()
        found.append(x.grad)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_inference_mode_just_calls() -> None:
    with torch.inference_mode():
        assert checkpoint(torch.exp, torch.zeros(2)).tolist() == [1, 1]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_policy_replaces_the_one_before(policy: Any) -> None:
    """Else attention would be recomputed within what is recomputed."""
    model = GPT(SMALL)
    recompute(model, "selective")
    recompute(model, policy)
    calls = []
    core = model.layers[0].attention.attend
    while isinstance(core, partial):
        calls.append(core.func)
        core = core.args[0]
    assert calls == [checkpoint] * (policy == "selective")
    recompute(model, "selective")
    assert all(isinstance(part, Layer) for part in model.layers)


def test_a_loop_over_a_slice_of_all_blocks_recomputes_and_one_over_some_is_refused() -> None:
    """Hugging Face's Llama loops over `self.layers[: config.num_hidden_layers]`."""
    model = TorchDropout()
    recompute(model, "every 2")
    assert (
        len(list(model.layers[:5])) == len(list(model.layers)) == 3
        and model.layers[1] is model.layers._modules["1"]
    )
    with pytest.raises(
        ValueError, match=r"blocks \[0, 1\] of the plan .*\(4,\)\): take a slice before recompute"
    ):
        model.layers[:2]


# ---- mistakes ----


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ("all", "unknown policy 'all': use none, full"),
        ("every", "unknown policy 'every'"),
        ("every 0", "'every 0' of 5 blocks: segments have 1 to 5"),
        ("every 6", "'every 6' of 5 blocks: segments have 1 to 5"),
        (((0, 1), 3), r"names blocks \[0, 1, 3\], not 0 to 4 in order"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused(policy: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        recompute(GPT(SMALL), policy)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"GPT has no nn\.ModuleList named 'blocks'.*layers="):
        recompute(GPT(SMALL), "full", layers="blocks")
    with pytest.raises(ValueError, match="block 0, a Sequential, has none"):
        recompute(TorchDropout(), "selective")


def test_a_function_that_does_something_else_the_second_time_is_found_out() -> None:
    turns = iter([2, 1])
    loss = checkpoint(
        lambda x: [x := x.exp() for _ in range(next(turns))][-1], torch.ones(3, requires_grad=True)
    )
    with pytest.raises(
        RuntimeError,
        match=r"lambda> saved torch.float32 \[3\] for backward as tensor 2 of 2, but nothing when run again",
    ):
        loss.sum().backward()
    model = TorchDropout()
    recompute(model, "every 2")
    loss = model(torch.ones(2, 6)).sum()
    model._modules["layers"]._modules["4"][2] = nn.Identity()
    with pytest.raises(RuntimeError, match="the checkpointed segment saved"):
        loss.backward()
    sizes = iter([3, 2])
    loss = checkpoint(lambda x: x[: next(sizes)].exp(), torch.ones(3, requires_grad=True))
    with pytest.raises(
        RuntimeError, match=r"\[3\] for backward as tensor 1 of 1.*\[2\] when run again"
    ):
        loss.sum().backward()


def test_an_input_changed_in_place_is_noticed() -> None:
    x = torch.ones(3, requires_grad=True) * 1
    loss = checkpoint(torch.exp, x).sum()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

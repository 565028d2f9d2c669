"""Which kernel computes attention, by the written rule; and that the rule holds where models
run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from minidist.full import compile_blocks
from minidist.full.model import GPT, GPTConfig, attention, cross_entropy_sum
from minidist.full.model.attention import causal_attention, cudnn_is_fastest
from minidist.full.recompute import recompute

HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "time", "cudnn"),
    [
        ((9, 0), HALF, 128, 2048, True),
        ((9, 0), torch.float16, 64, 1024, True),
        ((10, 0), HALF, 128, 4096, True),
        ((10, 3), HALF, 8, 1025, True),
        ((8, 0), HALF, 128, 2048, False),
        ((8, 9), HALF, 128, 2048, False),
        ((12, 0), HALF, 128, 2048, False),
        ((0, 0), HALF, 128, 2048, False),
        ((9, 0), torch.float32, 128, 2048, False),
        ((9, 0), torch.float64, 128, 2048, False),
        ((9, 0), HALF, 136, 2048, False),
        ((9, 0), HALF, 100, 2048, False),
        ((9, 0), HALF, 128, 1023, False),
    ],
)
def test_the_rule(
    capability: tuple[int, int], dtype: torch.dtype, head_dim: int, time: int, cudnn: bool
) -> None:
    assert cudnn_is_fastest(capability, dtype, head_dim, time) == cudnn


def grouped_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, logsumexp: bool, dropout: float, causal: bool
) -> Any:
    """Compute what cuDNN's operator would, on the CPU."""
    assert (
        bias is None
        and logsumexp
        and dropout == 0.0
        and causal
        and {q.dtype, k.dtype, v.dtype} == {HALF}
    )
    wide = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)]
    out, logsum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, *wide, 0.0, True)
    empty = q.new_empty(0, dtype=torch.int64)
    return out, logsum.unsqueeze(-1), None, None, q.shape[2], k.shape[2], empty, empty, empty


def grouped_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsum: Tensor, *_: Any
) -> Any:
    shared = q.shape[1] // k.shape[1]
    wide = [x.repeat_interleave(shared, 1) for x in (k, v)]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = backward(grad, q, *wide, out, logsum.squeeze(-1), 0.0, True)
    return grads[0], *(x.unflatten(1, (-1, shared)).sum(2) for x in grads[1:])


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Take the CPU for a Hopper GPU; the list has the key-value heads of each call of "cuDNN's"
    operator.
    """
    calls: list[int] = []

    def counted(q: Tensor, k: Tensor, *rest: Any) -> Any:
        calls.append(k.shape[1])
        return grouped_forward(q, k, *rest)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", counted, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", grouped_backward, "CPU")
    monkeypatch.setattr(attention, "DEVICES", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    torch._dynamo.reset()
    yield calls
    torch._dynamo.reset()
    library._destroy()


def heads(count: int, device: str = "cpu", dtype: torch.dtype = HALF) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(1, 1024, count, 8, generator=generator).to(device, dtype).requires_grad_()


def step(function: Any, *leaves: Tensor) -> list[Tensor]:
    """Return the output and the gradients."""
    found = function(*(x.transpose(1, 2) for x in leaves))
    return [found, *torch.autograd.grad(found.float().square().sum(), leaves)]


@pytest.mark.parametrize("shared", (2, 1))
def test_cudnn_gives_the_same_numbers_and_gradients_eager_and_compiled_as_one_graph(
    shared: int, hopper: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = heads(2), heads(shared), heads(shared)
    ours = step(causal_attention, *leaves)
    compile_blocks([])  # says that the GPU is a constant
    compiled = step(torch.compile(causal_attention, backend="aot_eager", fullgraph=True), *leaves)
    assert hopper == [shared, shared]
    monkeypatch.setattr(attention, "DEVICES", "cuda")
    usual = step(causal_attention, *leaves)
    assert hopper == [shared, shared], "on the CPU the rule is not asked"
    for one, other, right in zip(ours, compiled, usual, strict=True):
        assert torch.equal(one, other)
        assert (one - right).abs().max() <= 2.0**-7 * right.abs().max()


def test_autocast_counts_as_16_bits_and_recomputation_asks_the_rule_again(
    hopper: list[int],
) -> None:
    config = GPTConfig(
        layers=2, hidden=16, heads=2, key_value_heads=1, vocabulary=11, sequence=1024
    )
    tokens = torch.arange(1025).remainder(11).unsqueeze(0)
    gradients = []
    for policy, calls in (("none", 2), ("selective", 4), ("full", 4)):
        model = GPT(config)
        recompute(model, policy)
        with torch.autocast("cpu", dtype=HALF):
            loss = cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
        assert hopper == [1] * calls, policy
        hopper.clear()
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])
    with torch.no_grad():
        GPT(config)(tokens[:, :-1])
    assert hopper == [], "float32 without autocast is torch's"


def test_who_wants_no_cudnn_or_bits_that_repeat_or_has_an_old_one_gets_torchs_choice(
    hopper: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = [heads(1).transpose(1, 2) for _ in range(3)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        causal_attention(*leaves)
    torch.use_deterministic_algorithms(True)
    try:
        causal_attention(*leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91500)
    causal_attention(*leaves)
    assert hopper == []


def test_torchs_own_operator_takes_what_we_give_it(
    hopper: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shapes, on a device without numbers; the kernel itself needs a GPU."""
    monkeypatch.setattr(attention, "DEVICES", "meta")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", None)
    leaves = heads(4, "meta"), heads(2, "meta"), heads(2, "meta")
    found, *gradients = step(causal_attention, *leaves)
    assert found.shape == (1, 4, 1024, 8) and found.dtype == HALF
    assert [x.shape for x in gradients] == [x.shape for x in leaves]

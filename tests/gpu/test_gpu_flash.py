"""Flash attention by the kernels in Triton: each error, from float64, is at most twice that of
torch's own kernel.

With DEVICE=cpu, Triton's interpreter runs these kernels where Triton is installed; it cannot
multiply in bfloat16. Elsewhere the CPU's own engine is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
import torch.nn.functional as F
from jobs import CPU, DEVICE
from torch import Tensor

from minidist.full.context import flash
from minidist.full.context.flash import attend, attend_backward, flash_attention
from minidist.full.model.seen import Seen, among, beginnings, first_seen, in_documents

LENGTHS = [(1, 1), (7, 7), (64, 65), (65, 64), (1000, 1000), (1025, 1025), (1025, 300), (130, 1000)]
BITS = [torch.float32, torch.float16, *([] if CPU else [torch.bfloat16])]
INTERPRETED = CPU and flash.HAS_TRITON
Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(
            flash, "by_triton", lambda query, key: query.numel() > 0 and key.numel() > 0
        )


def draw(queries: int, keys: int, size: int, heads: int = 4, shared: int = 2) -> list[Tensor]:
    """Return query, key, value and the output's gradient as a model lays them out: [B, T, H, d],
    transposed.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = ((queries, heads), (keys, shared), (keys, shared), (queries, heads))
    drawn = (torch.randn(1 if CPU else 2, *it, size, generator=generator) for it in sizes)
    return [x.to(DEVICE).transpose(1, 2) for x in drawn]


def exactly(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if causal:
        queries, keys = (torch.arange(length, device=DEVICE) for length in scores.shape[-2:])
        scores = scores.masked_fill(keys > queries[:, None], -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def by_torch(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    output = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
    return output, exactly(query, key, value, causal)[1]


def step(
    attention: Attention, drawn: list[Tensor], causal: bool, dtype: torch.dtype
) -> list[Tensor]:
    """Return output, lse, and the gradients of query, key and value."""
    *leaves, gradient = (x.to(dtype).detach().requires_grad_() for x in drawn)
    output, lse = attention(*leaves, causal)
    return [output.detach(), lse.detach(), *torch.autograd.grad(output, leaves, gradient)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_kernels_are_as_right_as_torchs(
    lengths: tuple[int, int], size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that share keys, both masks, and any length. The interpreter is given tiles of many
    shapes.
    """
    if INTERPRETED:
        from minidist.full.context.kernels import flash_triton

        tiles = (
            {16: (32, 64), 64: (64, 32), 128: (128, 64)}[size] if max(lengths) < 500 else (256, 256)
        )
        monkeypatch.setattr(flash_triton, "tiles", lambda *_: (*tiles, 4, 2))
    for causal in (False, True):
        drawn = [x.to(dtype) for x in draw(*lengths, size)]
        exact = step(exactly, drawn, causal, torch.float64)
        theirs, ours = (step(it, drawn, causal, dtype) for it in (by_torch, flash_attention))
        for right, other, mine, like in zip(
            exact, theirs, ours, (drawn[0], drawn[0], *drawn[:3]), strict=True
        ):
            # some of torch's are 0 by chance
            limit = 2 * float((other - right).norm()) + 2e-6 * float(like.norm())
            assert float((mine - right).norm()) <= limit


def masks(time: int, batch: int) -> dict[str, Seen]:
    """Return windows and documents, the same for all sequences and not."""
    places = torch.arange(time)
    ends = [[0, time // 3, time // 3, time], [0, time - 1, time], [0, time]]
    documents = torch.stack([beginnings(torch.tensor(ends[row % 3])) for row in range(batch)])
    first = {
        "window": first_seen(time, 1 + time // 5),
        "one token": first_seen(time, 1),
        "as wide as the sequence": first_seen(time, time),
        "documents": first_seen(time, 0, documents),
        "documents and a window": first_seen(time, 1 + time // 7, documents),
    }
    found = {name: among(each, places, places) for name, each in first.items()}
    return found | {"cu_seqlens": in_documents(torch.tensor([0, time // 2, time]))}


def seen_step(drawn: list[Tensor], seen: Seen, dtype: torch.dtype, kernel: bool) -> list[Tensor]:
    """Return output and gradients by the kernels, or by softmax with the mask written out."""
    *leaves, gradient = (x.to(dtype).detach().requires_grad_() for x in drawn)
    if kernel:
        output, _ = flash_attention(*leaves, False, seen)
    else:
        query, key, value = leaves
        mask = seen.mask(slice(0, query.shape[2]), slice(0, key.shape[2])).to(DEVICE)
        bias = torch.zeros(mask.shape, dtype=dtype, device=DEVICE).masked_fill(~mask, -math.inf)
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias.unsqueeze(1), enable_gqa=True
        )
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("time", [1, 65, 130, *([] if INTERPRETED else [1025])])
def test_windows_and_documents_are_as_right_as_torchs_mask(time: int, dtype: torch.dtype) -> None:
    drawn = [x.to(dtype) for x in draw(time, time, 64)]
    for name, seen in masks(time, len(drawn[0])).items():
        exact = seen_step(drawn, seen, torch.float64, kernel=False)
        theirs, ours = (seen_step(drawn, seen, dtype, kernel) for kernel in (False, True))
        for right, other, mine, like in zip(exact, theirs, ours, drawn, strict=False):
            limit = 2 * float((other - right).norm()) + 2e-6 * float(like.norm())
            assert float((mine - right).norm()) <= limit, name


@pytest.mark.gpu
def test_queries_that_see_none_of_these_keys_get_0_and_no_nan() -> None:
    """As from another rank: the window of some queries begins behind these keys, or ends before."""
    keys, every = torch.arange(40, 90), torch.arange(150)
    seen = among(first_seen(150, 20), every, keys)
    *drawn, gradient = (x.requires_grad_() for x in draw(150, 50, 64))
    output, lse = flash_attention(*drawn, False, seen)
    some = (seen.first < seen.end)[0].to(DEVICE)
    assert not output[:, :, ~some].any() and (lse[:, :, ~some] == -math.inf).all()
    assert lse[:, :, some].isfinite().all()
    found = torch.autograd.grad(output, drawn, gradient)
    assert all(x.isfinite().all() for x in found) and not found[0][:, :, ~some].any()


@pytest.mark.gpu
def test_a_window_takes_the_time_of_what_is_seen() -> None:
    """A sixteenth of the keys in at most a third of the time, if tiles are left out."""
    if CPU:
        pytest.skip("the interpreter's time says nothing")
    drawn = [x.half() for x in draw(8192, 8192, 64)]
    places = torch.arange(8192)
    seconds = []
    for window in (8192, 512):
        seen = among(first_seen(8192, window), places, places)
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            attend(*drawn[:3], False, seen=seen)
            end.record()
            torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end))
    assert seconds[1] < seconds[0] / 3


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_scores_that_overflow_an_exponent_and_heads_of_any_size(causal: bool) -> None:
    """A tile beyond the last key has scores of 0, which is far above scores that are all
    negative.
    """
    for size in (8, 80, 128):
        drawn = draw(100, 70, size)
        drawn[0], drawn[1] = 300 * drawn[0].abs(), -drawn[1].abs()
        exact, ours = (
            step(it, drawn, causal, bits)
            for it, bits in zip(
                (exactly, flash_attention), (torch.float64, torch.float32), strict=True
            )
        )
        assert all(
            float((mine - right).norm()) <= 1e-3 * float(right.norm())
            for mine, right in zip(ours, exact, strict=True)
        )


@pytest.mark.gpu
def test_blocks_of_keys_merge_and_lse_has_a_gradient() -> None:
    """What is not rounded to 16 bits, is so by no step; each gradient is taken with the merged
    output and lse.
    """
    query, key, value, gradient = (x.half() for x in draw(70, 150, 64))
    exact = step(exactly, [query, key, value, gradient], False, torch.float64)
    blocks = [(key[:, :, cut], value[:, :, cut]) for cut in (slice(0, 100), slice(100, 150))]
    parts = [attend(query, *block, False) for block in blocks]
    lse = torch.stack([part for _, part in parts]).logsumexp(0)
    output = torch.stack([each * (part - lse).exp().unsqueeze(-1) for each, part in parts]).sum(0)
    found = [attend_backward(gradient, query, *block, output, lse, False) for block in blocks]
    assert {x.dtype for x in (output, lse, *found[0])} == {torch.float32}
    ours = (
        output,
        lse,
        sum(dq for dq, _, _ in found),
        *(torch.cat([it[n] for it in found], 2) for n in (1, 2)),
    )
    assert all(
        float((mine - right).norm()) <= 1e-3 * float(right.norm())
        for mine, right in zip(ours, exact, strict=True)
    )
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    right = torch.autograd.grad(exactly(*leaves, True)[1].sum(), leaves[:2])
    leaves = [x.float().requires_grad_() for x in (query, key, value)]
    mine = torch.autograd.grad(flash_attention(*leaves, True)[1].sum(), leaves[:2])
    assert all(
        float((a - b).norm()) <= 1e-5 * float(b.norm()) for a, b in zip(mine, right, strict=True)
    )


@pytest.mark.gpu
def test_it_compiles_without_a_break_and_repeats_bit_for_bit() -> None:
    torch._dynamo.reset()
    drawn = draw(130, 130, 64)
    whole = torch.compile(flash_attention, backend="aot_eager", fullgraph=True)
    first, again, compiled = (
        step(it, drawn, True, torch.float16) for it in (flash_attention, flash_attention, whole)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(
        float((a - b).norm()) <= 1e-3 * float(b.norm())
        for a, b in zip(compiled, first, strict=True)
    )
    query, key, value = (x.requires_grad_() for x in drawn[:3])
    (once,) = torch.autograd.grad(
        flash_attention(query, key, value, True)[0].sum(), query, create_graph=True
    )
    # it cannot be differentiated twice
    with pytest.raises(RuntimeError, match=r"derivative|backward"):
        once.sum().backward()

"""Flash attention against softmax(Q Kᵀ / √d) V, written out: the page, torch's kernel, and the
function of autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minidist.full.context import flash
from minidist.full.context.flash import (
    attend,
    attend_backward,
    flash_attention,
    operations,
    page_backward,
    page_forward,
)
from minidist.full.layers.compiled import compile_blocks
from minidist.full.memory.account import Account
from minidist.full.model.config import attended_pairs
from minidist.full.model.seen import Seen, among, beginnings, first_seen, in_documents

Found: TypeAlias = tuple[Tensor, ...]
Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
# H, H_kv, Tq, Tk, d; a tile of the page is 32 wide here
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 2, 7, 7, 5),
    (4, 2, 64, 65, 16),
    (6, 1, 33, 97, 16),
    (2, 2, 150, 32, 24),
]
BOTH = pytest.mark.parametrize("causal", [False, True])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "TILE", 32)


def draw(heads: int, shared: int, queries: int, keys: int, size: int) -> list[Tensor]:
    """Return query, key, value and the output's gradient as a model lays them out: [B, T, H, d],
    transposed.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = ((queries, heads), (keys, shared), (keys, shared), (queries, heads))
    return [
        torch.randn(2, *it, size, generator=generator, dtype=torch.float64).transpose(1, 2)
        for it in sizes
    ]


def by_softmax(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if causal:
        queries, keys = (torch.arange(length) for length in scores.shape[-2:])
        scores = scores.masked_fill(keys > queries[:, None], -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def by_torch(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=causal, enable_gqa=grouped
    ), query[..., 0]


def step(
    attention: Attention, drawn: list[Tensor], causal: bool, dtype: torch.dtype = torch.float64
) -> Found:
    """Return output, lse, and the gradients of query, key and value."""
    *leaves, gradient = (x.to(dtype).detach().requires_grad_() for x in drawn)
    output, lse = attention(*leaves, causal)
    return output.detach(), lse.detach(), *torch.autograd.grad(output, leaves, gradient)


def by_page(drawn: list[Tensor], causal: bool) -> Found:
    query, key, value, gradient = drawn
    output, lse = page_forward(query, key, value, causal)
    delta = (gradient * output).sum(-1)
    return output, lse, *page_backward(gradient, query, key, value, delta, lse, causal)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@BOTH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_softmax_attention(shape: tuple[int, int, int, int, int], causal: bool) -> None:
    drawn = draw(*shape)
    exact = step(by_softmax, drawn, causal)
    for found in (by_page(drawn, causal), step(flash_attention, drawn, causal)):
        for ours, right in zip(found, exact, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-13)


@BOTH
def test_gradients_are_finite_differences(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the output by torch's kernel, of lse by the page."""
    monkeypatch.setattr(flash, "TILE", 2)
    leaves = [x.contiguous().requires_grad_() for x in draw(4, 2, 5, 3, 2)[:3]]
    assert torch.autograd.gradcheck(lambda *x: flash_attention(*x, causal), leaves)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_in_few_bits_it_is_at_most_twice_as_far_off_as_torchs_kernel(
    dtype: torch.dtype, causal: bool
) -> None:
    for sharpness in (1, 1000):  # times 1000, exp() of a score overflows
        drawn = [x.to(dtype).double() for x in draw(4, 2, 130, 130, 32)]
        drawn[0] = (drawn[0] * sharpness).to(dtype).double()
        exact, theirs = (
            step(it, drawn, causal, bits)
            for it, bits in ((by_softmax, torch.float64), (by_torch, dtype))
        )
        ours, page = (
            step(flash_attention, drawn, causal, dtype),
            by_page([x.float() for x in drawn], causal),
        )
        assert ours[0].dtype == ours[2].dtype == dtype and ours[1].dtype == torch.float32
        for place in (0, 2, 3, 4):
            limit = 2 * error(theirs[place], exact[place])
            assert error(ours[place], exact[place]) <= limit and error(
                page[place], exact[place]
            ) <= max(limit, 1e-6)
        assert error(ours[1], exact[1]) < 1e-6 and error(page[1], exact[1]) < 1e-6


@BOTH
def test_large_scores_neither_overflow_nor_lose_digits(causal: bool) -> None:
    drawn = draw(4, 2, 70, 70, 16)
    drawn[0] *= 1000
    exact = step(by_softmax, drawn, causal)
    for found in (by_page(drawn, causal), step(flash_attention, drawn, causal)):
        for ours, right in zip(found, exact, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("queries", "keys"), [(3, 0), (0, 3), (0, 0)])
@BOTH
def test_a_query_without_keys_gets_0_and_no_nan(queries: int, keys: int, causal: bool) -> None:
    query, key, value = (x.requires_grad_() for x in draw(4, 2, queries, keys, 8)[:3])
    output, lse = flash_attention(query, key, value, causal)
    assert output.shape == query.shape and not output.any()
    assert lse.shape == query.shape[:3] and (lse == -math.inf).all()
    for leaf, gradient in zip(
        (query, key, value), torch.autograd.grad(output.sum(), (query, key, value)), strict=True
    ):
        assert gradient.shape == leaf.shape and not gradient.any()


def test_blocks_of_keys_merge_and_their_gradients_add_up() -> None:
    """Each block's gradients are taken with the output and the lse of all blocks, merged."""
    query, key, value, gradient = draw(4, 2, 40, 100, 16)
    exact = step(by_softmax, [query, key, value, gradient], False)
    blocks = [
        (key[:, :, cut], value[:, :, cut]) for cut in (slice(0, 30), slice(30, 31), slice(31, 100))
    ]
    parts = [attend(query, *block, False) for block in blocks]
    lse = torch.stack([part for _, part in parts]).logsumexp(0)
    output = torch.stack([each * (part - lse).exp().unsqueeze(-1) for each, part in parts]).sum(0)
    found = [attend_backward(gradient, query, *block, output, lse, False) for block in blocks]
    dq, dk, dv = (
        sum(dq for dq, _, _ in found),
        *(torch.cat([it[n] for it in found], 2) for n in (1, 2)),
    )
    for ours, right in zip((output, lse, dq, dk, dv), exact, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-13)


def test_partial_results_are_not_rounded_to_16_bits() -> None:
    query, key, value, gradient = (x.bfloat16() for x in draw(2, 1, 40, 40, 16))
    output, lse = attend(query, key, value, True)
    found = [output, lse, *attend_backward(gradient, query, key, value, output, lse, True)]
    exact = step(by_softmax, [x.double() for x in (query, key, value, gradient)], True)
    assert all(error(ours, right) < 1e-6 for ours, right in zip(found, exact, strict=True))


@BOTH
def test_any_layout_in_memory_gives_the_same(causal: bool) -> None:
    drawn = draw(4, 2, 40, 50, 16)
    exact = step(flash_attention, [x.contiguous() for x in drawn], causal)
    turned = [x.mT.contiguous().mT for x in drawn]  # rows of d numbers are scattered
    wider = [torch.cat([x, x], -1)[..., : x.shape[-1]] for x in drawn]
    alike = torch.ones((), dtype=torch.float64).expand(drawn[3].shape)
    for other in (turned, wider, [*turned[:2], *wider[2:]]):
        for ours, right in zip(step(flash_attention, other, causal), exact, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-13)
    flat, whole = (step(flash_attention, [*drawn[:3], g], causal) for g in (alike, alike.clone()))
    assert all(torch.equal(a, b) for a, b in zip(flat, whole, strict=True))


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = function(*args, **(kwargs or {}))
        self.elements = max(
            [self.elements, *(x.numel() for x in tree_leaves(made) if isinstance(x, Tensor))]
        )
        return made


def test_what_it_holds_for_backward_grows_with_the_length_and_not_with_its_square() -> None:
    heads, shared, size = 2, 1, 4
    for length in (1024, 2048, 4096, 8192):
        drawn = draw(heads, shared, length, length, size)
        query, key, value = (
            x[:1].to(torch.bfloat16, copy=True).requires_grad_() for x in drawn[:3]
        )
        account = Account()
        with account.recording(), Largest() as made:
            output, _ = flash_attention(query, key, value, True)
            held = account.sample()["activations"]
            output.sum().backward()
        assert held == length * (2 * size * (2 * heads + 2 * shared) + 4 * heads)  # Q, O, K, V; lse
        assert made.elements == heads * length * size


def test_the_page_computes_no_more_than_a_tile_at_a_time() -> None:
    drawn = draw(2, 1, 256, 256, 8)
    with Largest() as made:
        by_page(drawn, True)
    assert made.elements == drawn[0].numel()  # more than the 32² scores of 2 heads and 2 sequences
    # none above the diagonal
    assert [len(list(flash.tiles(256, 256, causal))) for causal in (False, True)] == [64, 36]
    assert (
        len(list(flash.tiles(256, 64, True))) == 1 + 7 * 2
        and len(list(flash.tiles(64, 256, True))) == 3
    )


def windows(time: int, window: int, tile: int) -> int:
    """Return how many tiles a window sees, by the formula: of tile i, those from the first key of
    its first query to the diagonal.
    """
    tops = range(0, time, tile)
    return sum(top // tile - max(0, top - window + 1) // tile + 1 for top in tops)


def seen_by_page(drawn: list[Tensor], seen: Seen) -> tuple[Found, Found]:
    """Return outputs and gradients of `flash_attention`, and by softmax with the mask written
    out.
    """

    def flash_step(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attention(*leaves[:3], False, seen)

    def explicit(query: Tensor, key: Tensor, value: Tensor, _: bool) -> tuple[Tensor, Tensor]:
        copies = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        mask = seen.mask(slice(0, query.shape[2]), slice(0, key.shape[2]))
        scores = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(
            ~mask[:, None], -math.inf
        )
        weights = scores.softmax(-1).masked_fill(~mask.any(-1)[:, None, :, None], 0)
        return weights @ value, scores.logsumexp(-1)

    return step(flash_step, drawn, False), step(explicit, drawn, False)


@pytest.mark.parametrize("window", [1, 7, 31, 32, 33, 64, 149, 150, 200])
def test_a_window_is_softmax_with_its_mask_and_leaves_tiles_out(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward compute just the tiles of the formula, and the operations are theirs."""
    places = torch.arange(150)
    seen, drawn = among(first_seen(150, window), places, places), draw(4, 2, 150, 150, 16)
    computed, plain = [], flash.scores_of

    def counted(q: Tensor, k: Tensor, rows: slice, columns: slice, *rest: Any) -> Tensor:
        computed.append((rows, columns))
        return plain(q, k, rows, columns, *rest)

    monkeypatch.setattr(flash, "scores_of", counted)
    for ours, right in zip(*seen_by_page(drawn, seen), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
    assert len(computed) == 2 * windows(150, window, 32)
    pairs = sum(
        len(range(150)[rows]) * len(range(150)[columns])
        for rows, columns in computed[: len(computed) // 2]
    )
    assert operations(*drawn[:2], False, seen=seen) == 2 * 4 * 4 * 16 * pairs
    if window >= 150:
        assert pairs * 128 * 4 == operations(*drawn[:2], True)


def test_with_tiles_of_one_pair_the_operations_are_those_of_the_pairs_in_the_window() -> None:
    places, drawn = torch.arange(40), draw(4, 2, 40, 40, 16)
    for window in (0, 1, 9, 40):
        seen = among(first_seen(40, window), places, places)
        found = operations(*drawn[:2], False, tile=1, seen=seen)
        assert found == 2 * 4 * 4 * 16 * attended_pairs(40, window)


def test_packed_documents_are_softmax_inside_each_and_leave_tiles_out() -> None:
    ends = [[0, 5, 5, 130, 150], [0, 149, 150]]
    documents = torch.stack([beginnings(torch.tensor(each)) for each in ends])
    places = torch.arange(150)
    for window in (0, 9):
        seen = among(first_seen(150, window, documents), places, places)
        for ours, right in zip(*seen_by_page(draw(4, 2, 150, 150, 16), seen), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
    seen = in_documents(torch.tensor([0, 64, 128]))  # cu_seqlens
    assert len(list(flash.tiles(128, 128, False, seen=seen))) == 2 * 3  # of 4 * 5 / 2


def test_keys_from_elsewhere_are_seen_by_their_positions() -> None:
    """Some queries see none of them: their output is 0, their lse -inf, and no gradient is nan."""
    query, key, value, gradient = draw(4, 2, 50, 40, 16)
    keys = torch.arange(30, 70)
    seen = among(first_seen(150, 20)[:, ::3], torch.arange(0, 150, 3), keys)
    drawn = [query, key, value, gradient]
    for ours, right in zip(*seen_by_page(drawn, seen), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


def test_a_mask_that_does_not_fit_is_refused_with_its_shapes() -> None:
    query, key, value, _ = draw(4, 2, 50, 60, 8)
    fits = among(first_seen(50, 3), torch.arange(50), torch.arange(60))
    wrong = {
        "bounds .1, 49. and .1, 50. for queries": fits._replace(first=fits.first[:, 1:]),
        "bounds .3, 50. and .3, 50.": Seen(fits.first.expand(3, -1), fits.end.expand(3, -1)),
    }
    for words, seen in wrong.items():
        with pytest.raises(ValueError, match=words):
            flash_attention(query, key, value, False, seen)
    with pytest.raises(ValueError, match="causal=True and seen= both say what a query sees"):
        flash_attention(query, key, value, True, fits)


def test_autocast_chooses_the_dtype_and_rounds_no_sum() -> None:
    query, key, value, gradient = (x.float() for x in draw(2, 1, 40, 40, 16))
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_attention(query, key, value, True)[0].dtype == torch.bfloat16
        output, lse = attend(query, key, value, True)
        by_page = attend_backward(
            gradient, query, key, value, output, lse, True, torch.zeros_like(lse)
        )
    exact = step(by_softmax, draw(2, 1, 40, 40, 16), True)
    assert all(
        error(ours, right) < 1e-6
        for ours, right in zip((output, lse, *by_page), exact, strict=True)
    )


def test_it_compiles_without_a_break_and_works_without_numbers() -> None:
    compile_blocks(())  # what it leaves alone, it leaves alone in the whole process
    drawn = draw(4, 2, 40, 50, 16)
    whole = torch.compile(flash_attention, backend="aot_eager", fullgraph=True)
    for ours, right in zip(
        step(whole, drawn, True), step(flash_attention, drawn, True), strict=True
    ):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-13)
    for keys in (50, 0):
        nowhere = step(flash_attention, [x.to("meta") for x in draw(4, 2, 40, keys, 16)], True)
        assert [x.shape for x in nowhere] == [
            x.shape for x in step(flash_attention, draw(4, 2, 40, keys, 16), True)
        ]


def test_a_gpu_takes_the_kernels_where_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "HAS_TRITON", True)

    def chosen(
        dtype: torch.dtype, size: int, capability: tuple[int, int] = (9, 0), keys: int = 3
    ) -> bool:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        with FakeTensorMode():
            query, key = (
                torch.empty(1, 2, length, size, dtype=dtype, device="cuda") for length in (4, keys)
            )
            return flash.by_triton(query, key)

    assert chosen(torch.bfloat16, 128) and chosen(torch.float16, 256) and chosen(torch.float32, 128)
    assert (
        not chosen(torch.float64, 64)
        and not chosen(torch.float32, 256)
        and not chosen(torch.bfloat16, 264)
    )
    assert not chosen(torch.bfloat16, 128, capability=(7, 5)) and not chosen(
        torch.bfloat16, 128, keys=0
    )
    monkeypatch.setattr(flash, "HAS_TRITON", False)
    assert not chosen(torch.bfloat16, 128)


def test_what_does_not_fit_is_refused_with_its_shapes() -> None:
    query, key, value, _ = draw(4, 2, 5, 6, 8)
    wrong = [
        (query, key, value[:, :, :5]),
        (query[:, :3], key, value),
        (query, key[:, :0], value[:, :0]),
        (query[:1], key, value),
        (query[..., :4], key, value),
        (query[0], key[0], value[0]),
        (query.float(), key, value),
        (query, key.float(), value),
        (query, key, value.float()),
    ]
    for three in wrong:
        with pytest.raises(
            ValueError, match=r"\[.*\] torch.float.*: attention takes \[B, H, Tq, d\]"
        ):
            flash_attention(*three, True)


def test_it_cannot_be_differentiated_twice() -> None:
    query, key, value = (x.requires_grad_() for x in draw(1, 1, 4, 4, 2)[:3])
    (once,) = torch.autograd.grad(
        flash_attention(query, key, value, True)[0].sum(), query, create_graph=True
    )
    with pytest.raises(RuntimeError, match=r"derivative .* not implemented"):
        once.sum().backward()


@pytest.mark.parametrize("dtype", (torch.int64, torch.int8, torch.bool))
def test_numbers_without_a_fraction_are_refused(dtype: torch.dtype) -> None:
    """Weights between 0 and 1 would become zeros and ones."""
    parts = [torch.ones(1, 2, 3, 4).to(dtype) for _ in range(3)]
    with pytest.raises(
        ValueError,
        match=rf"attention of {dtype} would truncate its weights.*query.to.torch.float32",
    ):
        flash_attention(*parts, True)


def test_without_numbers_lse_has_a_gradient_too() -> None:
    parts = [torch.empty(1, 2, 5, 4, device="meta", requires_grad=True) for _ in range(3)]
    output, lse = flash_attention(*parts, True)
    (output.sum() + lse.sum()).backward()  # type: ignore[no-untyped-call]
    assert all(part.grad is not None and part.grad.shape == part.shape for part in parts)

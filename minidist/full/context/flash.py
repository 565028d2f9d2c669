"""Flash attention: softmax(Q Kᵀ / √d) V, tile by tile, in memory that grows with T and not with T².

                keys ─▶
           ┌────┬────┬────┬────┐     a tile of scores S = Q Kᵀ / √d exists for a moment; what stays of it for each
    queries│ ◣  │    │    │    │     query is the largest score so far, the sum of exp(score - largest), and the
        │  ├────┼────┼────┼────┤     sum of exp(score - largest) · value. A larger score shrinks both sums by
        ▼  │ ■  │ ◣  │    │    │     exp(before - largest), once: the *online softmax*.
           ├────┼────┼────┼────┤
           │ ■  │ ■  │ ◣  │    │     ◣ causal: masked at the diagonal; ■ whole; tiles above are never computed
           └────┴────┴────┴────┘

Where a query does not see all keys before it, `Seen` says which tiles have something to see: those
of a window, of documents that are packed into a row, or any others (*block-sparse*). All other
tiles are left out, and one that is seen in part is masked.

Forward keeps the output and, for each query, one number: lse = log Σ exp(score) (*log-sum-exp*).
From it backward has every probability of a tile again, P = exp(S - lse), and needs no second pass
over the keys. With Δ = rowsum(dO · O):

    dV = Pᵀ dO        dS = P · (dO Vᵀ - Δ) / √d        dQ = dS K        dK = dSᵀ Q

Cost: 4 B H Tq Tk d floating point operations forward and 10 backward (8 and the scores again), half
of them if causal. From forward to backward it holds Q, K, V, O, and 4 bytes a query for lse. (Dao
et al. 2022, "FlashAttention"; Dao 2023, "FlashAttention-2", whose algorithms 1 and 2 these are; the
online softmax is by Milakov & Gimelshein 2018.)

`page_forward` and `page_backward` are the page to read. On a CPU torch's kernel in C++ does the
same up to twice as fast, on a GPU `flash_triton.py` does; `attend` and `attend_backward` choose, by
a rule.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from minidist.full.model.attention import at_autocast
from minidist.full.model.seen import Seen, bounds

HAS_TRITON = find_spec("triton") is not None
TILE = 128  # queries, and keys, of a tile of the page


def page_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    tile: int | None = None,
    seen: Seen | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output and lse as `flash_attention` does, by tiles of so many queries and keys, or of
    `TILE`.
    """
    q, k, v = by_shared_heads(query, key), key.unsqueeze(2), value.unsqueeze(2)
    output = torch.zeros_like(q)  # [B, H_kv, H/H_kv, Tq, d]
    total = torch.zeros_like(q[..., :1])
    largest = torch.full_like(total, -torch.inf)
    for rows, columns in tiles(query.shape[2], key.shape[2], causal, tile, seen):
        scores = scores_of(q, k, rows, columns, causal, seen)
        now = torch.maximum(largest[..., rows, :], scores.amax(-1, keepdim=True))
        # -inf of a query that has seen no key yet: its weights are 0, not exp(-inf + inf)
        base = now.masked_fill(now == -torch.inf, 0)
        # shrink is 0 the first time
        weights, shrink = (scores - base).exp(), (largest[..., rows, :] - base).exp()
        total[..., rows, :] = shrink * total[..., rows, :] + weights.sum(-1, keepdim=True)
        output[..., rows, :] = shrink * output[..., rows, :] + weights @ v[..., columns, :]
        largest[..., rows, :] = now
    # the largest score alone adds 1: the sum is less only of a query that sees no key
    output /= total.clamp(min=1)
    return output.flatten(1, 2), (largest + total.log()).squeeze(-1).flatten(1, 2)


def page_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    delta: Tensor,
    lse: Tensor,
    causal: bool,
    seen: Seen | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given that of the output and rowsum(dO · O) [B,
    H, Tq].
    """
    q, do = by_shared_heads(query, key), by_shared_heads(gradient, key)
    k, v = key.unsqueeze(2), value.unsqueeze(2)
    delta = by_shared_heads(delta.unsqueeze(-1), key)
    lse = by_shared_heads(lse.unsqueeze(-1), key)
    lse = lse.masked_fill(lse == -torch.inf, 0)  # of a query without keys: its scores are -inf, too
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(key)
    dv = torch.zeros_like(value)
    scale = math.sqrt(q.shape[-1])
    for rows, columns in tiles(query.shape[2], key.shape[2], causal, seen=seen):
        scores = scores_of(q, k, rows, columns, causal, seen)
        p = (scores - lse[..., rows, :]).exp()
        dp = do[..., rows, :] @ v[..., columns, :].mT
        ds = p * (dp - delta[..., rows, :]) / scale
        # over the heads that share these values
        dv[..., columns, :] += (p.mT @ do[..., rows, :]).sum(2)
        dk[..., columns, :] += (ds.mT @ q[..., rows, :]).sum(2)
        dq[..., rows, :] += ds @ k[..., columns, :]
    return dq.flatten(1, 2), dk, dv


def tiles(
    queries: int,
    keys: int,
    causal: bool,
    tile: int | None = None,
    seen: Seen | None = None,
) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of each tile, without those wholly above the diagonal, or those of
    which nothing is seen.
    """
    tile = tile or TILE
    blocks = None if seen is None else seen.tiles(keys, tile).tolist()
    for top in range(0, queries, tile):
        rows = slice(top, top + tile)
        stop = min(keys, rows.stop) if causal else keys
        for left in range(0, stop, tile):
            if blocks is None or blocks[top // tile][left // tile]:
                yield rows, slice(left, left + tile)


def operations(
    query: Tensor, key: Tensor, causal: bool, tile: int | None = None, seen: Seen | None = None
) -> int:
    """Return the floating point operations of the page's forward: 4 d for each pair of query and
    key in the tiles that it computes, for each head and sequence. Backward takes 10 d.
    """
    batch, heads, queries, channels = query.shape
    keys, pairs = key.shape[2], 0
    for rows, columns in tiles(queries, keys, causal, tile, seen):
        pairs += len(range(queries)[rows]) * len(range(keys)[columns])
    return 4 * batch * heads * channels * pairs


def scores_of(
    q: Tensor,
    k: Tensor,
    rows: slice,
    columns: slice,
    causal: bool,
    seen: Seen | None = None,
) -> Tensor:
    """Return a tile of Q Kᵀ / √d; if causal, -inf where a key is later than the query, counted from
    the top left, and else where it is not `seen`.
    """
    scores = q[..., rows, :] @ k[..., columns, :].mT / math.sqrt(q.shape[-1])
    if seen is not None:
        there = slice(columns.start, columns.start + scores.shape[-1])
        unseen = ~seen.mask(rows, there).to(q.device)
        scores.masked_fill_(unseen[:, None, None], -torch.inf)
    # tiles are squares: at the diagonal both begin with the same position
    if causal and rows == columns:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def by_shared_heads(x: Tensor, key: Tensor) -> Tensor:
    """Return heads [B, H, ...] beside those with which they share a key-value head: [B, H_kv,
    H/H_kv, ...].
    """
    batch, heads, *rest = x.shape
    groups = key.shape[1]
    return x.view(batch, groups, heads // groups, *rest)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, seen: Seen | None = None
) -> tuple[Tensor, Tensor]:
    """Return softmax(Q Kᵀ / √d) V and log Σ exp(score).

    Both have a gradient; under autocast it computes in its dtype.

    Parameters
    ----------
    query : Tensor
        [B, H, Tq, d], in any layout.
    key, value : Tensor
        [B, H_kv, Tk, d]; head h of `query` reads head h // (H / H_kv).
    causal : bool
        Query i sees keys 0 to i, also where Tq and Tk differ.
    seen : Seen, optional
        Which keys each query sees: a window, packed documents, or tiles of `TILE` queries and keys.
        It takes the place of `causal`, which is then False. On a GPU, tiles of one's own choice are
        computed by the page.

    Returns
    -------
    tuple of Tensor
        The output [B, H, Tq, d] in the dtype of `query`, and lse [B, H, Tq] in float32 (float64 for
        float64). Without any key the output is 0, and lse is -inf.

    Raises
    ------
    ValueError
        If the shapes do not fit, or the numbers are no floating-point numbers.
    """
    return FlashAttention.apply(*at_autocast(query, key, value), causal, seen)  # type: ignore[no-any-return, no-untyped-call]


class FlashAttention(torch.autograd.Function):
    """Saves query, key, value, output and lse: nothing of the size of Tq x Tk."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, seen: Seen | None
    ) -> tuple[Tensor, Tensor]:
        output, lse = attend(query, key, value, causal, query.dtype, seen)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.set_materialize_grads(False)
        ctx.causal, ctx.seen = causal, seen
        return output, lse

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        gradient = torch.zeros_like(output) if gradient is None else gradient
        found = attend_backward(
            gradient,
            query,
            key,
            value,
            output,
            lse,
            ctx.causal,
            dlse,
            ctx.seen,
        )
        return (*(x.to(query.dtype) for x in found), None, None)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    dtype: torch.dtype | None = None,
    seen: Seen | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output and lse as `flash_attention` does, outside autograd.

    The output has the given dtype. By default it is float32 or float64: outputs over several blocks
    of keys are to be merged, and lose digits if each is rounded to 16 bits before.
    """
    if not fit(query, key, value):
        told = ", ".join(f"{list(x.shape)} {x.dtype}" for x in (query, key, value))
        raise ValueError(
            f"{told}: attention takes [B, H, Tq, d], twice [B, H_kv, Tk, d], of one dtype; H_kv "
            "divides H"
        )
    if not query.is_floating_point():
        fault = f"attention of {query.dtype} would truncate its weights, which lie between 0 and 1"
        raise ValueError(
            f"{fault}: give it floating-point numbers, such as query.to(torch.float32)"
        )
    if seen is not None:
        if causal:
            raise ValueError(
                "causal=True and seen= both say what a query sees: give causal=False beside seen="
            )
        seen.check(query)
    if by_triton(query, key):
        from minidist.full.context.kernels.flash_triton import triton_forward

        rows = map(whole_rows, (query, key, value))
        return triton_forward(*rows, causal, dtype or torch.float32, *bounds(seen, query.device))  # type: ignore[no-any-return]
    q, k, v = map(widened, (query, key, value))
    if by_torch(query, key) and seen is None:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=causal
        )
    else:
        with without_autocast(query.device.type):
            output, lse = page_forward(q, k, v, causal, seen=seen)
    return output.to(dtype or q.dtype), lse


def fit(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Tell whether attention takes these shapes and dtypes."""
    if not query.dim() == key.dim() == 4 or key.shape != value.shape:
        return False
    if (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3]):
        return False
    heads, groups = query.shape[1], key.shape[1]
    return groups > 0 and heads % groups == 0 and query.dtype == key.dtype == value.dtype


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    causal: bool,
    dlse: Tensor | None = None,
    seen: Seen | None = None,
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, in float32 or float64; `dlse` is that of lse.

    `output` and `lse` may be those of more blocks of keys, merged: then these are the gradients
    through this block.
    """
    if by_triton(query, key):
        from minidist.full.context.kernels.flash_triton import triton_backward

        rows = map(whole_rows, (gradient, query, key, value, output))
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        return tuple(
            triton_backward(
                *rows,
                lse.contiguous(),
                dlse.contiguous(),
                causal,
                *bounds(seen, query.device),
            )
        )
    do, q, k, v, o = map(widened, (gradient, query, key, value, output))
    if by_torch(query, key) and dlse is None and seen is None:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return tuple(backward(do, q, k, v, o, lse, 0.0, causal))
    delta = (do * o).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    with without_autocast(query.device.type):
        return page_backward(do, q, k, v, delta, lse, causal, seen)


def by_triton(query: Tensor, key: Tensor) -> bool:
    """Tell whether the kernels of `flash_triton.py` compute: on GPUs since Ampere, for rows of up
    to 512 bytes.
    """
    row = query.shape[3] * query.element_size()
    fits = query.dtype != torch.float64 and row <= 512 and query.numel() > 0 and key.numel() > 0
    return (
        HAS_TRITON
        and query.is_cuda
        and fits
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def by_torch(query: Tensor, key: Tensor) -> bool:
    """Tell whether torch's C++ kernel computes: on a CPU, and on `meta`.

    Without any key it would end the process.
    """
    return query.is_meta or (query.is_cpu and query.numel() > 0 and key.numel() > 0)


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Return a context that computes in the dtypes that are given.

    `meta` has no autocast to leave out.
    """
    return (
        torch.autocast(kind, enabled=False)
        if torch.amp.is_autocast_available(kind)
        else nullcontext()
    )


def widened(x: Tensor) -> Tensor:
    """Return a tensor in 32 bits or more, so that nothing is rounded to 16."""
    return whole_rows(x.to(torch.promote_types(x.dtype, torch.float32)))


def whole_rows(x: Tensor) -> Tensor:
    """Return a tensor whose rows of d numbers are contiguous: kernels take that for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()

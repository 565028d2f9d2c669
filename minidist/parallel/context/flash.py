"""Flash attention: softmax(Q Kᵀ / √d) V, tile by tile, in memory that grows with T and not with T².

                keys ─▶
           ┌────┬────┬────┬────┐     a tile of scores S = Q Kᵀ / √d exists for a moment; what stays of it for each
    queries│ ◣  │    │    │    │     query is the largest score so far, the sum of exp(score - largest), and the
        │  ├────┼────┼────┼────┤     sum of exp(score - largest) · value. A larger score shrinks both sums by
        ▼  │ ■  │ ◣  │    │    │     exp(before - largest), once: the *online softmax*.
           ├────┼────┼────┼────┤
           │ ■  │ ■  │ ◣  │    │     ◣ causal: masked at the diagonal; ■ whole; tiles above are never computed
           └────┴────┴────┴────┘

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

from minidist.model.attention import at_autocast

HAS_TRITON = find_spec("triton") is not None
TILE = 128  # queries, and keys, of a tile of the page


def page_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return output and lse as `flash_attention` does, by tiles of so many queries and keys, or of
    `TILE`.
    """
    q, k, v = by_shared_heads(query, key), key.unsqueeze(2), value.unsqueeze(2)
    output = torch.zeros_like(q)  # [B, H_kv, H/H_kv, Tq, d]
    total = torch.zeros_like(q[..., :1])
    largest = torch.full_like(total, -torch.inf)
    for rows, columns in tiles(query.shape[2], key.shape[2], causal, tile):
        scores = scores_of(q, k, rows, columns, causal)
        now = torch.maximum(largest[..., rows, :], scores.amax(-1, keepdim=True))
        # shrink is 0 the first time
        weights, shrink = (scores - now).exp(), (largest[..., rows, :] - now).exp()
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given that of the output and rowsum(dO · O) [B,
    H, Tq].
    """
    q, do = by_shared_heads(query, key), by_shared_heads(gradient, key)
    k, v = key.unsqueeze(2), value.unsqueeze(2)
    delta = by_shared_heads(delta.unsqueeze(-1), key)
    lse = by_shared_heads(lse.unsqueeze(-1), key)
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(key)
    dv = torch.zeros_like(value)
    scale = math.sqrt(q.shape[-1])
    for rows, columns in tiles(query.shape[2], key.shape[2], causal):
        scores = scores_of(q, k, rows, columns, causal)
        p = (scores - lse[..., rows, :]).exp()
        dp = do[..., rows, :] @ v[..., columns, :].mT
        ds = p * (dp - delta[..., rows, :]) / scale
        # over the heads that share these values
        dv[..., columns, :] += (p.mT @ do[..., rows, :]).sum(2)
        dk[..., columns, :] += (ds.mT @ q[..., rows, :]).sum(2)
        dq[..., rows, :] += ds @ k[..., columns, :]
    return dq.flatten(1, 2), dk, dv


def tiles(
    queries: int, keys: int, causal: bool, tile: int | None = None
) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of each tile, without those wholly above the diagonal."""
    tile = tile or TILE
    for top in range(0, queries, tile):
        rows = slice(top, top + tile)
        stop = min(keys, rows.stop) if causal else keys
        for left in range(0, stop, tile):
            yield rows, slice(left, left + tile)


def scores_of(
    q: Tensor,
    k: Tensor,
    rows: slice,
    columns: slice,
    causal: bool,
) -> Tensor:
    """Return a tile of Q Kᵀ / √d; if causal, -inf where a key is later than the query, counted from
    the top left.
    """
    scores = q[..., rows, :] @ k[..., columns, :].mT / math.sqrt(q.shape[-1])
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
    query: Tensor, key: Tensor, value: Tensor, causal: bool
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
    return FlashAttention.apply(*at_autocast(query, key, value), causal)  # type: ignore[no-any-return, no-untyped-call]


class FlashAttention(torch.autograd.Function):
    """Saves query, key, value, output and lse: nothing of the size of Tq x Tk."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        output, lse = attend(query, key, value, causal, query.dtype)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.set_materialize_grads(False)
        ctx.causal = causal
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
        )
        return (*(x.to(query.dtype) for x in found), None)


def attend(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, dtype: torch.dtype | None = None
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
    if by_triton(query, key):
        from minidist.parallel.context.flash_triton import triton_forward

        rows = map(whole_rows, (query, key, value))
        return triton_forward(*rows, causal, dtype or torch.float32)  # type: ignore[no-any-return]
    q, k, v = map(widened, (query, key, value))
    if by_torch(query, key):
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=causal
        )
    else:
        with without_autocast(query.device.type):
            output, lse = page_forward(q, k, v, causal)
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
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, in float32 or float64; `dlse` is that of lse.

    `output` and `lse` may be those of more blocks of keys, merged: then these are the gradients
    through this block.
    """
    if by_triton(query, key):
        from minidist.parallel.context.flash_triton import triton_backward

        rows = map(whole_rows, (gradient, query, key, value, output))
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        return tuple(
            triton_backward(
                *rows,
                lse.contiguous(),
                dlse.contiguous(),
                causal,
            )
        )
    do, q, k, v, o = map(widened, (gradient, query, key, value, output))
    if by_torch(query, key) and dlse is None:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return tuple(backward(do, q, k, v, o, lse, 0.0, causal))
    delta = (do * o).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    with without_autocast(query.device.type):
        return page_backward(do, q, k, v, delta, lse, causal)


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

"""Flash attention on a GPU: the loops of `flash.py`'s page, as kernels in Triton.

    page                      here
    a tile of rows            `forward` and `backward_query` have a program for each; it loops over the keys
    a tile of columns         `backward_key` has a program for each; it loops over queries of all heads that share it
    exp(S / √d - ...)         exp2(S · log2(e)/√d - ...): GPUs have exp2, and the factor is applied once
    the mask at the diagonal  two loops: tiles that every row sees, without a mask; those at the diagonal or the end
    `Seen`                    one loop, from the tile of the first key that a row of the program's tile sees to that of
                              the last, each masked; `backward_key` has the same of the queries that see a key

Each number is written by one program, and nothing is added atomically: the same inputs give the
same bits. Scores and sums are float32; probabilities are rounded to the dtype of the inputs before
they multiply, as in all kernels of 16 bits. Backward does 14 B H Tq Tk d operations, not 10, as
both of its kernels compute S and dO Vᵀ; in return no gradient is read again to be added to. (Dao
2023, section 3; Triton's tutorial on fused attention has the same loops.)

`OWN` is how many positions a program's own tile has, `OTHER` a tile of those it loops over. A
head's `size` channels are padded by zeros to `SIZE`, a power of two. All exponents and logarithms
here are those of 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from minidist.full.context.kernels.tile import (
    at,
    bounds_of,
    finite,
    limits,
    limits_of_queries,
    load,
    place,
    seeing,
    seen,
    store,
)

LOG2E = tl.constexpr(math.log2(math.e))


# for a compiler, one operation
@torch.library.custom_op("minidist::flash_forward", mutates_args=())
def triton_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    dtype: torch.dtype,
    first: Tensor | None = None,
    end: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output in this dtype, and lse, as `attend` does.

    Rows of d numbers are contiguous. Query i sees keys first[i] to end[i] - 1: int32 [1 or B, Tq].
    """
    output, lse = outputs(query, dtype)
    launch(forward, query, (query, key, value, output), (lse,), causal, first, end)
    return output, lse


@torch.library.custom_op("minidist::flash_backward", mutates_args=())
def triton_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    dlse: Tensor,
    causal: bool,
    first: Tensor | None = None,
    end: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, as `attend_backward` does.

    `lse` and `dlse` are contiguous.
    """
    (dq, dk, dv), delta = gradients(query, key, value), torch.empty_like(lse)
    of_query = (query, key, value, gradient, output, dq)
    launch(backward_query, query, of_query, (lse, dlse, delta), causal, first, end)
    of_key = (query, key, value, gradient, dk, dv)
    by = seen_by(first, end, key.shape[2])
    launch(backward_key, key, of_key, (lse, delta), causal, *by)
    return dq, dk, dv


def seen_by(
    first: Tensor | None, end: Tensor | None, keys: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the first query that sees each key, and that behind the last one: int32 [1 or B, Tk].

    Both bounds of queries ascend. Therefore those that see key j begin where `end` exceeds j, and
    end where `first` does.
    """
    if first is None or end is None:
        return None, None
    every = torch.arange(keys, device=first.device, dtype=torch.int32)
    wanted = every.expand(len(first), keys).contiguous()
    begins = torch.searchsorted(end, wanted, right=True, out_int32=True)
    return begins, torch.searchsorted(first, wanted, right=True, out_int32=True)


def outputs(query: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return memory for the output and lse."""
    return torch.empty_like(query, dtype=dtype), query.new_empty(
        query.shape[:3], dtype=torch.float32
    )


def gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the gradients."""
    dq, dk, dv = (torch.empty_like(x, dtype=torch.float32) for x in (query, key, value))
    return dq, dk, dv


triton_forward.register_fake(lambda query, key, value, causal, dtype, *_: outputs(query, dtype))
triton_backward.register_fake(lambda gradient, query, key, value, *_: gradients(query, key, value))


def launch(
    kernel: Any,
    tiled: Tensor,
    rows: tuple[Tensor, ...],
    numbers: tuple[Tensor, ...],
    causal: bool,
    low: Tensor | None = None,
    high: Tensor | None = None,
) -> None:
    """Run a program for each tile of `tiled`.

    For each position `rows` have d numbers, and `numbers` have one. Position i of `tiled` meets the
    others from low[i] to high[i] - 1.
    """
    query, key = rows[:2]
    batch, heads, length, size = tiled.shape
    padded = max(16, triton.next_power_of_2(size))
    own, other, warps, stages = tiles(kernel is not forward, query, padded)
    strides = tuple(x.stride()[:3] for x in rows)
    scale = LOG2E.value / math.sqrt(size)
    sizes = (heads, query.shape[1] // key.shape[1], query.shape[2], key.shape[2], scale)
    grid = (triton.cdiv(length, own) * batch * heads,)
    ranged = low is not None and high is not None
    # the same for all sequences, or one for each
    step = length if ranged and len(low) > 1 else 0  # type: ignore[arg-type]
    bounds = (low, high, step) if ranged else (numbers[0], numbers[0], 0)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    with torch.cuda.device_of(query):
        kernel[grid](
            (*rows, *numbers),
            strides,
            sizes,
            bounds,
            ranged,
            causal,
            size,
            padded,
            own,
            other,
            **options,
        )


def tiles(backward: bool, query: Tensor, padded: int) -> tuple[int, int, int, int]:
    """Return OWN, OTHER, warps, and how many tiles are loaded ahead, by a rule that measures
    nothing.

    On GPUs of data centres these are about the sizes that torch's FlexAttention takes; others have
    less memory.
    """
    capability = torch.cuda.get_device_capability(query.device) if query.is_cuda else (0, 0)
    if query.dtype == torch.float32:
        return 32, 16, 4, 2
    if capability not in ((8, 0), (9, 0), (10, 0), (10, 3)):
        return 64 if padded <= 128 else 32, 32, 4, 2
    if padded > 128:
        return (64, 32, 8, 2) if backward else (64, 64, 4, 2)
    if backward:
        return (64, 64, 4, 2) if capability == (8, 0) else (128, 64, 8, 3)
    return 128, 64, 4 if padded <= 64 else 8, 3


@triton.jit
def forward(
    tensors,
    strides,
    sizes,
    bounds,
    ranged: constexpr,
    causal: constexpr,
    size: constexpr,
    SIZE: constexpr,
    OWN: constexpr,
    OTHER: constexpr,
):
    heads, group, queries, keys, scale = sizes
    Q, K, V, Out, Lse = tensors
    start, batch, head = place(queries, heads, OWN)
    # the last rows see most keys: they begin first
    start = tl.cdiv(queries, OWN) * OWN - OWN - start
    Q = at(Q, strides[0], batch, head)
    K, V = at(K, strides[1], batch, head // group), at(V, strides[2], batch, head // group)
    rows = start + tl.arange(0, OWN)
    q = load(Q, strides[0], rows, queries, size, SIZE, True)
    output, total = tl.zeros([OWN, SIZE], tl.float32), tl.zeros([OWN], tl.float32)
    largest = tl.full([OWN], -float("inf"), tl.float32)
    low, high = bounds_of(bounds, batch, rows, queries, keys, ranged)
    begin, whole, end = limits(start, keys, low, high, ranged, causal, OWN, OTHER)
    for masked in tl.static_range(2):
        for first in tl.range(whole if masked else begin, end if masked else whole, OTHER):
            columns = first + tl.arange(0, OTHER)
            k = load(K, strides[1], columns, keys, size, SIZE, masked)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if masked:
                inside = seen(rows, columns, keys, low, high, ranged, causal)
                scores = tl.where(inside, scores, -float("inf"))
            now = tl.maximum(largest, tl.max(scores, 1) * scale)
            base = finite(now, ranged)
            weights = tl.exp2(scores * scale - base[:, None])
            shrink = tl.exp2(largest - base)
            total = shrink * total + tl.sum(weights, 1)
            v = load(V, strides[2], columns, keys, size, SIZE, masked)
            output = tl.dot(
                weights.to(v.dtype), v, shrink[:, None] * output, input_precision="ieee"
            )
            largest = now
    total = tl.where(total == 0.0, 1.0, total)  # of a row that sees no key
    output /= total[:, None]
    store(
        at(Out, strides[3], batch, head),
        strides[3],
        rows,
        queries,
        size,
        SIZE,
        output,
    )
    lse = (largest + tl.log2(total)) / LOG2E  # the natural logarithm
    tl.store(Lse + (batch * heads + head).to(tl.int64) * queries + rows, lse, rows < queries)


@triton.jit
def backward_query(
    tensors,
    strides,
    sizes,
    bounds,
    ranged: constexpr,
    causal: constexpr,
    size: constexpr,
    SIZE: constexpr,
    OWN: constexpr,
    OTHER: constexpr,
):
    heads, group, queries, keys, scale = sizes
    Q, K, V, Do, Out, Dq, Lse, Dlse, Delta = tensors
    start, batch, head = place(queries, heads, OWN)
    start = tl.cdiv(queries, OWN) * OWN - OWN - start
    Q = at(Q, strides[0], batch, head)
    K, V = at(K, strides[1], batch, head // group), at(V, strides[2], batch, head // group)
    rows = start + tl.arange(0, OWN)
    here = (batch * heads + head).to(tl.int64) * queries + rows
    q = load(Q, strides[0], rows, queries, size, SIZE, True)
    do = load(
        at(Do, strides[3], batch, head),
        strides[3],
        rows,
        queries,
        size,
        SIZE,
        True,
    )
    output = load(
        at(Out, strides[4], batch, head),
        strides[4],
        rows,
        queries,
        size,
        SIZE,
        True,
    )
    lse = tl.load(Lse + here, rows < queries, 0.0) * LOG2E
    dlse = tl.load(Dlse + here, rows < queries, 0.0)
    delta = tl.sum(do.to(tl.float32) * output.to(tl.float32), 1) - dlse
    tl.store(Delta + here, delta, rows < queries)  # for `backward_key`
    do, dq = do.to(q.dtype), tl.zeros([OWN, SIZE], tl.float32)
    low, high = bounds_of(bounds, batch, rows, queries, keys, ranged)
    begin, whole, end = limits(start, keys, low, high, ranged, causal, OWN, OTHER)
    for masked in tl.static_range(2):
        for first in tl.range(whole if masked else begin, end if masked else whole, OTHER):
            columns = first + tl.arange(0, OTHER)
            k = load(K, strides[1], columns, keys, size, SIZE, masked)
            v = load(V, strides[2], columns, keys, size, SIZE, masked)
            p = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None])
            if masked:
                p = tl.where(seen(rows, columns, keys, low, high, ranged, causal), p, 0.0)
            ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    dq *= scale / LOG2E
    store(at(Dq, strides[5], batch, head), strides[5], rows, queries, size, SIZE, dq)


@triton.jit
def backward_key(
    tensors,
    strides,
    sizes,
    bounds,
    ranged: constexpr,
    causal: constexpr,
    size: constexpr,
    SIZE: constexpr,
    OWN: constexpr,
    OTHER: constexpr,
):
    shared_heads, group, queries, keys, scale = sizes
    Q, K, V, Do, Dk, Dv, Lse, Delta = tensors
    start, batch, shared = place(keys, shared_heads, OWN)
    columns = start + tl.arange(0, OWN)
    k = load(
        at(K, strides[1], batch, shared),
        strides[1],
        columns,
        keys,
        size,
        SIZE,
        True,
    )
    v = load(
        at(V, strides[2], batch, shared),
        strides[2],
        columns,
        keys,
        size,
        SIZE,
        True,
    )
    dk = tl.zeros([OWN, SIZE], tl.float32)
    dv = tl.zeros([OWN, SIZE], tl.float32)
    low, high = bounds_of(bounds, batch, columns, keys, queries, ranged)
    begin, whole, stop = limits_of_queries(start, queries, low, high, ranged, causal, OWN, OTHER)
    for member in range(group):
        head = shared * group + member
        Qh, Doh = at(Q, strides[0], batch, head), at(Do, strides[3], batch, head)
        for unmasked in tl.static_range(2):
            for first in tl.range(whole if unmasked else begin, stop if unmasked else whole, OTHER):
                rows = first + tl.arange(0, OTHER)
                here = (batch * shared_heads * group + head).to(tl.int64) * queries + rows
                q = load(Qh, strides[0], rows, queries, size, SIZE, True)
                do = load(Doh, strides[3], rows, queries, size, SIZE, True).to(q.dtype)
                lse = tl.load(Lse + here, rows < queries, 0.0)
                delta = tl.load(Delta + here, rows < queries, 0.0)
                scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
                p = tl.exp2(scores - (lse * LOG2E)[None, :])
                if not unmasked:
                    p = tl.where(seeing(columns, rows, low, high, ranged), p, 0.0)
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
                # transposed, as p is
                ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :])
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    dk *= scale / LOG2E
    store(at(Dk, strides[4], batch, shared), strides[4], columns, keys, size, SIZE, dk)
    store(at(Dv, strides[5], batch, shared), strides[5], columns, keys, size, SIZE, dv)

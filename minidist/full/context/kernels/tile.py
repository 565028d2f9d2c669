"""What the kernels of `flash_triton.py` share: where a program's tile is, what it sees, and its rows
in memory.
"""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def place(length, heads, OWN: constexpr):
    """Return the first position of a program's own tile, its batch and its head.

    Neighbours share a head's memory.
    """
    count = tl.cdiv(length, OWN)
    tile, both = tl.program_id(0) % count, tl.program_id(0) // count
    return tile * OWN, both // heads, both % heads


@triton.jit
def bounds_of(bounds, batch, positions, length, others, ranged: constexpr):
    """Return which positions of the other side each position of a tile meets: from `low` on, and
    less than `high`; beyond the end, none.

    Without bounds, two tensors that nobody reads.
    """
    low, high = positions, positions
    if ranged:
        Low, High, step = bounds
        here = batch.to(tl.int64) * step + positions
        low = tl.load(Low + here, positions < length, others)
        high = tl.load(High + here, positions < length, 0)
    return low, high


@triton.jit
def limits(
    start,
    keys,
    low,
    high,
    ranged: constexpr,
    causal: constexpr,
    OWN: constexpr,
    OTHER: constexpr,
):
    """Return where the tiles of keys begin that some row of a tile sees, where those end that all
    rows see, and where those end that some row sees.
    """
    if ranged:
        begin = tl.min(low, 0) // OTHER * OTHER
        whole = begin  # each of these tiles is masked
        end = tl.max(high, 0)
    else:
        begin = start * 0
        whole = (tl.minimum(start, keys) if causal else keys) // OTHER * OTHER
        end = tl.minimum(start + OWN, keys) if causal else keys
    return begin, whole, end


@triton.jit
def limits_of_queries(
    start,
    queries,
    low,
    high,
    ranged: constexpr,
    causal: constexpr,
    OWN: constexpr,
    OTHER: constexpr,
):
    """Return where the tiles of queries begin that see some column of a tile, where those end that
    are to be masked, and where those end that see any.
    """
    if ranged:
        begin = tl.min(low, 0) // OTHER * OTHER
        whole = tl.max(high, 0)
        stop = whole
    else:
        begin = start // OTHER * OTHER if causal else start * 0
        whole = tl.minimum(tl.cdiv(start + OWN, OTHER) * OTHER, queries) if causal else start * 0
        stop = queries
    return begin, whole, stop


@triton.jit
def seen(rows, columns, keys, low, high, ranged: constexpr, causal: constexpr):
    """Return which row sees which column."""
    if ranged:
        inside = (columns[None, :] >= low[:, None]) & (columns[None, :] < high[:, None])
    else:
        inside = columns[None, :] < keys
        if causal:
            inside &= columns[None, :] <= rows[:, None]
    return inside


@triton.jit
def seeing(columns, rows, low, high, ranged: constexpr):
    """Return which column is seen by which row."""
    if ranged:
        inside = (rows[None, :] >= low[:, None]) & (rows[None, :] < high[:, None])
    else:
        inside = columns[:, None] <= rows[None, :]
    return inside


@triton.jit
def finite(largest, ranged: constexpr):
    """Return the largest scores, and 0 for a row that has seen no key yet: its weights are 0, not
    exp(-inf + inf).
    """
    if ranged:
        largest = tl.where(largest == -float("inf"), 0.0, largest)
    return largest


@triton.jit
def at(tensor, strides, batch, head):
    """Return where a head begins; in 64 bits, as a tensor may have more than 2^31 elements."""
    return tensor + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def load(
    head,
    strides,
    positions,
    length,
    size: constexpr,
    SIZE: constexpr,
    masked: constexpr,
):
    """Return rows of a head, padded by zeros."""
    channels = tl.arange(0, SIZE)
    there = head + positions.to(tl.int64)[:, None] * strides[2] + channels[None, :]
    if masked or size != SIZE:
        found = tl.load(
            there,
            (positions < length)[:, None] & (channels < size)[None, :],
            0.0,
        )
    else:
        found = tl.load(there)
    return found


@triton.jit
def store(
    head,
    strides,
    positions,
    length,
    size: constexpr,
    SIZE: constexpr,
    rows,
):
    channels = tl.arange(0, SIZE)
    there = head + positions.to(tl.int64)[:, None] * strides[2] + channels[None, :]
    tl.store(there, rows, (positions < length)[:, None] & (channels < size)[None, :])

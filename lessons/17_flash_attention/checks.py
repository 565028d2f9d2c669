"""Lesson 17: what is checked, and for how many points.

All is float64, and compared with attention written out. A meter sees what each of torch's
operations returns: the bytes that are alive at a time, the operations of matrix products, and
whether a tensor has a row for all queries and a column for all keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from judges import QKV
from judges_backward import judge_backward, judge_function, run_backward, run_function
from judges_bytes import judge_bytes, run_bytes
from judges_forward import judge_forward, judge_stream, run_forward, run_stream
from judges_ranks import judge_ranks, run_ranks

from minidist.course.grader.contract import (
    BY_OPTIMIZERS,
    STRATEGIES,
    Array,
    Case,
    Check,
    Draw,
    Task,
)

BY_HAND = (
    *STRATEGIES,
    "torch.distributed",
    "torch.ops",
    "torch.nn.attention",
    "torch.nn.modules.activation",
)
BYTES = Task(1, "bytes", BY_HAND)
STREAM = Task(2, "the online softmax", BY_HAND)
FORWARD = Task(3, "forward, tile by tile", BY_HAND)
BACKWARD = Task(4, "backward, and what is saved", BY_HAND, imports=BY_OPTIMIZERS)  # by the account
RANKS = Task(5, "keys on several ranks", BY_HAND)

# ---------------------------------------------------------------- cases

BELOW = ", all scores of every other query are far below 0"


def each(make: Callable[..., Case], *sizes: Any) -> Draw:
    """Draw `make(rng, *size)` for each size."""
    return lambda rng: [make(rng, *size) for size in sizes]


def settings(rng: np.random.Generator, count: int) -> Case:
    """Draw rows: batch, heads, kv_heads, queries, keys, head_size, itemsize, budget; some budgets
    fit to the byte.
    """
    rows = []
    for number in range(count):
        shared, kv = (int(n) for n in rng.integers(2, 6, 2))
        batch, queries, keys = (int(n) for n in rng.integers(2, 5000, 3))
        d, itemsize = 16 * int(rng.integers(1, 9)), int(rng.choice([2, 8]))
        batch, heads, tokens = batch % 13 + 2, shared * kv, int(rng.integers(10**4, 10**5))
        plain = batch * tokens * ((heads + 2 * kv) * d + heads * tokens) * itemsize
        flash = batch * tokens * (2 * (heads + kv) * d * itemsize + 4 * heads)
        budget = (int(rng.integers(10**11, 10**15)), plain, flash)[number % 3]
        rows.append([batch, heads, kv, queries, keys, d, itemsize, budget])
    return Case(({"rows": np.array(rows)},), f"{count} settings")


def far_apart(given: dict[str, Array], large: float) -> dict[str, Array]:
    """Return the same with signs such that all scores of every other query, from the first on, are
    far below 0.
    """
    signs = np.where(np.arange(given["query"].shape[2]) % 2, 1.0, -1.0)[:, None]
    return given | {
        "query": signs * (large + np.abs(given["query"])),
        "key": 1 + np.abs(given["key"]),
    }


def stream(
    rng: np.random.Generator,
    lengths: tuple[int, ...],
    queries: int,
    large: float = 2.0,
    apart: bool = False,
) -> Case:
    """Draw queries, and keys and values in blocks; scores grow with `large`."""
    given = {name: rng.normal(size=(2, 2, sum(lengths), 4)) for name in QKV[1:]}
    given |= {"query": large * rng.normal(size=(2, 2, queries, 4))}
    given = (far_apart(given, large) if apart else given) | {"lengths": np.array(lengths)}
    blocks = f"blocks of {', '.join(map(str, lengths[:6]))}{', ...' * (len(lengths) > 6)} keys"
    return Case((given,), blocks + BELOW * apart)


def tiles(
    rng: np.random.Generator,
    queries: int,
    keys: int,
    causal: bool,
    heads: int = 2,
    large: float = 2.0,
    size: int = 8,
    block: tuple[int, int] | None = None,
    apart: bool = False,
) -> Case:
    """Draw queries, keys, values and a gradient [1, H, T, d]. Backward is asked about `block` of
    the keys.
    """
    given = {name: rng.normal(size=(1, heads, keys, size)) for name in QKV[1:]}
    given |= {name: rng.normal(size=(1, heads, queries, size)) for name in ("query", "gradient")}
    given["query"] *= large
    given = far_apart(given, large) if apart else given
    given |= {"causal": np.array(int(causal)), "block": np.array(block or (0, keys))}
    some = f", {block[1] - block[0]} of them here" if block else ""
    return Case(
        (given,), f"{queries} queries, {keys} keys{some}{', causal' * causal}{BELOW * apart}"
    )


def spread(
    rng: np.random.Generator, counts: tuple[int, ...], queries: int, large: float = 2.0
) -> Case:
    """Draw queries, the same for every rank, and for each rank so many keys and values."""
    query = large * rng.normal(size=(2, 2, queries, 4))
    given = [
        {"query": query} | {name: rng.normal(size=(2, 2, n, 4)) for name in QKV[1:]} for n in counts
    ]
    return Case(tuple(given), f"{', '.join(map(str, counts))} keys on ranks 0, 1, ...")


# ---------------------------------------------------------------- the checks

MANY = (3, 1, 4, 2) * 15
LOW_STREAM = ((4, 7, 2, 9), 6, 700.0, True)
LOW_TILES = (200, 200, True, 2, 700.0, 8, None, True)
SIZES, ONLINE, MERGED = (
    (run_bytes, judge_bytes),
    (run_stream, judge_stream),
    (run_ranks, judge_ranks),
)
TILED, AGAIN, SAVED = (
    (run_forward, judge_forward),
    (run_backward, judge_backward),
    (run_function, judge_function),
)
CHECKS = [
    Check(
        BYTES,
        "the matrix, what is held, the longest sequence",
        10,
        each(settings, (3,), (6,)),
        *SIZES,
    ),
    Check(
        STREAM,
        "blocks of keys, one after the other",
        6,
        each(stream, ((5,), 3), ((4, 7, 2), 6)),
        *ONLINE,
    ),
    Check(STREAM, "little is held of many blocks", 4, each(stream, (MANY, 40)), *ONLINE),
    Check(
        STREAM,
        "scores of a thousand",
        3,
        each(stream, ((4, 7, 2, 9), 6, 1000.0), LOW_STREAM),
        *ONLINE,
    ),
    Check(FORWARD, "one tile", 4, each(tiles, (7, 7, False), (100, 100, True)), *TILED),
    Check(FORWARD, "several tiles", 6, each(tiles, (384, 384, False), (384, 384, True)), *TILED),
    Check(
        FORWARD,
        "a last tile that is not full",
        5,
        each(tiles, (300, 300, False), (300, 300, True)),
        *TILED,
    ),
    Check(
        FORWARD,
        "more keys than queries, and fewer",
        4,
        each(tiles, (150, 330, True), (330, 150, True)),
        *TILED,
    ),
    Check(
        FORWARD, "memory and products", 5, each(tiles, (768, 768, True), (768, 768, False)), *TILED
    ),
    Check(
        FORWARD,
        "scores of a thousand",
        2,
        each(tiles, (200, 200, True, 2, 1000.0), LOW_TILES),
        *TILED,
    ),
    Check(BACKWARD, "one tile", 3, each(tiles, (7, 7, False), (100, 100, True)), *AGAIN),
    Check(BACKWARD, "several tiles", 5, each(tiles, (384, 384, False), (300, 300, True)), *AGAIN),
    Check(
        BACKWARD,
        "more keys than queries, and fewer",
        3,
        each(tiles, (150, 330, True), (330, 150, True)),
        *AGAIN,
    ),
    Check(
        BACKWARD,
        "a block of the keys",
        4,
        each(tiles, (150, 400, False, 2, 2.0, 8, (130, 290))),
        *AGAIN,
    ),
    Check(BACKWARD, "memory and products", 4, each(tiles, (768, 768, True, 1)), *AGAIN),
    Check(
        BACKWARD,
        "what the function saves",
        6,
        each(tiles, (300, 300, True), (400, 400, False, 1)),
        *SAVED,
    ),
    Check(
        RANKS,
        "keys on two and four ranks",
        5,
        each(spread, ((5, 9), 6), ((3, 1, 8, 4), 2)),
        *MERGED,
    ),
    Check(RANKS, "a rank without keys", 2, each(spread, ((0, 6, 3), 4)), *MERGED),
    Check(RANKS, "scores of a thousand", 2, each(spread, ((4, 3, 5), 6, 1000.0)), *MERGED),
    Check(RANKS, "the same under mpirun", 2, each(spread, ((5, 9), 6)), *MERGED, wire="mpi"),
]

# ---- hidden: other cases of the checks above ----

CHECKS += [
    Check(BYTES, "other settings", 3, each(settings, (20,)), *SIZES, hidden=True),
    Check(
        STREAM,
        "other sizes",
        2,
        each(stream, ((1, 1, 50), 1), ((30, 2, 9, 1), 9)),
        *ONLINE,
        hidden=True,
    ),
    Check(
        FORWARD,
        "other sizes",
        3,
        each(tiles, (129, 129, True), (1, 257, False), (1, 1, True)),
        *TILED,
        hidden=True,
    ),
    Check(
        BACKWARD,
        "other sizes",
        3,
        each(tiles, (129, 257, True), (260, 3, False)),
        *AGAIN,
        hidden=True,
    ),
    Check(
        BACKWARD,
        "other sizes of the function",
        2,
        each(tiles, (257, 400, False)),
        *SAVED,
        hidden=True,
    ),
    Check(
        RANKS, "other sizes", 2, each(spread, ((7,), 3), ((2, 0, 0, 5), 1)), *MERGED, hidden=True
    ),
]

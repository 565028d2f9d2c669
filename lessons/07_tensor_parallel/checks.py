"""Lesson 07: what is checked, and for how many points.

Everything is float64. The judges compute with whole matrices, on one rank; a trace tells which
collectives an answer called in forward and in backward. Values of task 1 are whole numbers and
compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from judges import BY_WORDS, CUTS, border, by_words, judge_border, judge_words, layer
from judges_layers import judge_layer

from minidist.course.grader.contract import STRATEGIES, Case, Check, Draw, Task

BY_HAND = (*STRATEGIES, "torch.distributed")
BORDERS = Task(1, "enter and leave", BY_HAND)
MLP = Task(2, "an MLP", BY_HAND)
ATTENTION = Task(3, "attention by heads", BY_HAND)
EMBEDDING = Task(4, "embedding by words", BY_HAND)
LOSS = Task(5, "the loss of split logits", BY_HAND)

# ---------------------------------------------------------------- cases


def each(make: Callable[..., Case], *sizes: Any) -> Draw:
    """Draw `make(rng, *size)` for each size."""
    return lambda rng: [make(rng, *size) for size in sizes]


def terms(rng: np.random.Generator, ranks: int) -> Case:
    """Draw whole numbers: on each rank another term, and another gradient."""
    drawn = rng.integers(-99, 99, (ranks, 2, 2, 3)).astype(float)
    return Case(tuple({"x": x, "gradient": gradient} for x, gradient in drawn), f"P = {ranks}")


def mlp(rng: np.random.Generator, ranks: int, hidden: int, channels: int) -> Case:
    """Draw an MLP."""
    shapes = dict(
        zip(CUTS["mlp"], ((channels, hidden), channels, (hidden, channels), hidden), strict=True)
    )
    return layer_case(rng, ranks, hidden, shapes, {}, f"{channels} channels")


def attention(rng: np.random.Generator, ranks: int, heads: int, head_dim: int) -> Case:
    """Draw an attention layer."""
    shapes = dict.fromkeys(("query", "key", "value"), (heads * head_dim, 6)) | {
        "output": (6, heads * head_dim)
    }
    return layer_case(
        rng, ranks, 6, shapes, {"heads": heads, "head_dim": head_dim}, f"{heads} heads"
    )


def layer_case(
    rng: np.random.Generator,
    ranks: int,
    hidden: int,
    shapes: Mapping[str, Any],
    facts: Mapping[str, int],
    label: str,
) -> Case:
    """Draw weights, an input and a gradient, the same for every rank."""
    given = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    given |= {name: rng.normal(size=(2, 3, hidden)) for name in ("x", "gradient")}
    return Case(
        ({**given, **{name: np.array(fact) for name, fact in facts.items()}},) * ranks,
        f"P = {ranks}, {label}",
    )


def words(rng: np.random.Generator, ranks: int, vocabulary: int, largest: float = 1.0) -> Case:
    """Draw a table, tokens with the first and the last word among them, and logits up to about
    `largest`.
    """
    tokens = rng.permutation(np.concatenate([[0, vocabulary - 1], rng.integers(0, vocabulary, 10)]))
    given = {"table": rng.normal(size=(vocabulary, 5)), "tokens": tokens}
    given |= {
        "gradient": rng.normal(size=(3, 4, 5)),
        "logits": largest * rng.normal(size=(12, vocabulary)),
    }
    return Case((given,) * ranks, f"P = {ranks}, {vocabulary} words")


# ---------------------------------------------------------------- the checks


# Two things about each part of the exercise, which a check unpacks: the program that every rank runs
# with the student's code, and what judges its results.
ENTER = border("copy_to"), judge_border(True)
LEAVE = border("reduce_from"), judge_border(False)
WHOLE_MLP, HEADS = ((layer(kind), judge_layer(kind)) for kind in CUTS)
TABLE, LOGITS = ((by_words(array), judge_words(array)) for array in BY_WORDS)

CHECKS = [
    Check(BORDERS, "f: the identity, then a sum", 6, each(terms, (2,), (4,)), *ENTER),
    Check(BORDERS, "g: a sum, then the identity", 6, each(terms, (2,), (4,)), *LEAVE),
    Check(BORDERS, "f under mpirun", 3, each(terms, (2,)), *ENTER, wire="mpi"),
    Check(MLP, "as the whole MLP", 14, each(mlp, (2, 4, 8), (4, 4, 8)), *WHOLE_MLP),
    Check(MLP, "channels that do not divide", 6, each(mlp, (3, 4, 10)), *WHOLE_MLP),
    Check(MLP, "the same under mpirun", 3, each(mlp, (2, 4, 8)), *WHOLE_MLP, wire="mpi"),
    Check(ATTENTION, "as the whole attention", 15, each(attention, (2, 4, 2), (4, 4, 2)), *HEADS),
    Check(ATTENTION, "the same under mpirun", 3, each(attention, (2, 2, 2)), *HEADS, wire="mpi"),
    Check(EMBEDDING, "as the whole table", 6, each(words, (2, 6), (3, 10)), *TABLE),
    Check(EMBEDDING, "the same under mpirun", 2, each(words, (2, 7)), *TABLE, wire="mpi"),
    Check(LOSS, "as of the whole logits", 10, each(words, (2, 6), (3, 10)), *LOGITS),
    Check(LOSS, "logits of a thousand", 4, each(words, (3, 9, 1000.0)), *LOGITS),
    Check(LOSS, "the same under mpirun", 2, each(words, (2, 7)), *LOGITS, wire="mpi"),
]

# ---- hidden: other cases of the checks above ----

CHECKS += [
    Check(BORDERS, "f on other rank counts", 3, each(terms, (1,), (3,), (5,)), *ENTER, hidden=True),
    Check(BORDERS, "g on other rank counts", 2, each(terms, (1,), (5,)), *LEAVE, hidden=True),
    Check(
        MLP,
        "other sizes and rank counts",
        5,
        each(mlp, (1, 3, 5), (5, 3, 7)),
        *WHOLE_MLP,
        hidden=True,
    ),
    Check(ATTENTION, "other heads", 5, each(attention, (1, 2, 3), (3, 6, 3)), *HEADS, hidden=True),
    Check(EMBEDDING, "other vocabularies", 2, each(words, (1, 5), (4, 9)), *TABLE, hidden=True),
    Check(
        LOSS, "other vocabularies", 3, each(words, (1, 5, 10.0), (4, 9, 10.0)), *LOGITS, hidden=True
    ),
]

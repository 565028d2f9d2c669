"""Lesson 17, task 4: the programs that run backward, and see what is saved for it, and their
judges.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from judges import (
    QKV,
    TILE,
    attention,
    cuts_of,
    expect_tensor,
    scores_of,
    seen_by,
    tensors,
    wrong_masks,
    wrong_outputs,
    wrongly_masked,
)
from judges_tiles import Meter, expect_tiles, measured

from minidist import Communicator
from minidist.course.grader import contract
from minidist.course.grader.contract import Array, Arrays, Case, Figures, Note, Wrong, expect_close
from minidist.full.memory.account import Account


def forward_of_all(given: Arrays) -> tuple[Array, Array, Arrays, Array]:
    """Return output and lse of all keys, the block of keys that backward is asked about, and what
    is seen of it.
    """
    seen = seen_by(given["query"].shape[2], given["key"].shape[2], bool(given["causal"]))
    cut = slice(*given["block"].tolist())
    block = dict(given) | {name: given[name][:, :, cut] for name in QKV[1:]}
    return *attention(given, seen), block, seen[:, cut]


def run_backward(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4a."""
    output, lse, block, _ = forward_of_all(given)
    leaves = [*tensors(block, ("gradient", *QKV)), torch.from_numpy(output), torch.from_numpy(lse)]
    names = ("gradient", *QKV, "output", "lse")
    kept = contract.untouched(**dict(zip(names, leaves, strict=True)))
    with kept, torch.no_grad(), Meter(*leaves) as meter:
        found = exercise.flash_backward(*leaves, bool(given["causal"]))
        if not isinstance(found, tuple | list) or len(found) != 3:
            raise Wrong(
                "flash_backward returns something else than the three gradients of query, key and "
                "value"
            )
    found = [
        expect_tensor(each, f"the gradient of {name}", 4)
        for each, name in zip(found, QKV, strict=True)
    ]
    return {name: each.numpy() for name, each in zip(QKV, found, strict=True)} | measured(meter)


def gradients(
    given: Arrays, p: Array, delta: Array, scale: float | None = None, ds: Array | None = None
) -> dict[str, Array]:
    """Return gradients, given the weights and delta, or that of the scores."""
    do = given["gradient"]
    scale = do.shape[-1] ** -0.5 if scale is None else scale
    ds = p * (do @ given["value"].swapaxes(-1, -2) - delta) * scale if ds is None else ds
    key = ds.swapaxes(-1, -2) @ given["query"]
    return {"query": ds @ given["key"], "key": key, "value": p.swapaxes(-1, -2) @ do}


def wrong_gradients(given: Arrays) -> dict[str, Callable[[], dict[str, Array]]]:
    """Return what known mistakes give, by clause."""
    output, lse, block, seen = forward_of_all(given)
    scores, causal = scores_of(block, seen), bool(given["causal"])
    queries, keys = seen.shape
    p, delta = np.exp(scores - lse[..., None]), (given["gradient"] * output).sum(-1, keepdims=True)
    dp = given["gradient"] @ block["value"].swapaxes(-1, -2)
    computed = (np.arange(keys) // TILE <= np.arange(queries)[:, None] // TILE) | (not causal)

    def by_tile(reduce: Callable[..., Array], of: Array = scores) -> Array:
        """Reduce each tile, and repeat the result as often as the tile has keys."""
        parts = [reduce(of[..., cut]) for cut in cuts_of(keys)]
        widths = [cut.stop - cut.start for cut in cuts_of(keys)]
        return np.concatenate(
            [np.repeat(part, n, -1) for part, n in zip(parts, widths, strict=True)], -1
        )

    def largest(part: Array) -> Array:
        return part.max(-1, keepdims=True, initial=-1e300)

    def own_lse(part: Array) -> Array:
        return largest(part) + np.log(np.exp(part - largest(part)).sum(-1, keepdims=True) + 1e-300)

    def weighing(less: Array) -> dict[str, Array]:
        return gradients(
            block, np.exp(np.where(np.isfinite(scores), scores - less, -np.inf)), delta
        )

    def masked(mask: Array) -> dict[str, Array]:
        return gradients(block, np.exp(scores_of(block, mask) - lse[..., None]), delta)

    right = gradients(block, p, delta)
    rows = p * (dp - delta) * block["query"].shape[-1] ** -0.5

    def swapped(name: str, value: Array) -> dict[str, Array]:
        return right | ({name: value} if value.shape == right[name].shape else {})

    last_rows, last_keys = (np.arange(n) >= (n - 1) // TILE * TILE for n in (queries, keys))
    wrong: dict[str, Callable[[], dict[str, Array]]] = {
        "Δ, rowsum(dO · O), is forgotten": lambda: gradients(block, p, 0 * delta),
        "Δ is added, not subtracted": lambda: gradients(block, p, -delta),
        "Δ is subtracted from P (dO Vᵀ), not from dO Vᵀ before it is multiplied by P": lambda: (
            gradients(
                block, p, delta, ds=(p * dp - delta) * given["query"].shape[-1] ** -0.5 * computed
            )
        ),
        "Δ is a sum over these keys alone, not rowsum(dO · O), which is over all keys": lambda: (
            gradients(block, p, (p * dp).sum(-1, keepdims=True))
        ),
        "Δ is a sum over the keys of a tile, not rowsum(dO · O), which is over all keys": lambda: (
            gradients(block, p, by_tile(lambda part: part.sum(-1, keepdims=True), p * dp))
        ),
        "Δ is the sum of dO, not of dO · O": lambda: gradients(
            block, p, given["gradient"].sum(-1, keepdims=True)
        ),
        "the weights are exp(score - the largest score of these keys), not exp(score - lse)": lambda: (
            weighing(largest(scores))
        ),
        "the weights are exp(score - the tile's own largest score), not exp(score - lse)": lambda: (
            weighing(by_tile(largest))
        ),
        "each tile has a softmax of its own: the weights are to be exp(score - lse)": lambda: (
            weighing(by_tile(own_lse))
        ),
        "the softmax is over these keys alone, not over all keys, as lse is": lambda: weighing(
            own_lse(scores)
        ),
        "Δ is the mean of dO · O, not its sum": lambda: gradients(
            block, p, delta / output.shape[-1]
        ),
        "Δ is the sum of O, not of dO · O": lambda: gradients(
            block, p, output.sum(-1, keepdims=True)
        ),
        "Δ is the sum over all of a query's heads": lambda: gradients(
            block, p, delta.sum(1, keepdims=True) + 0 * delta
        ),
        "dO is taken to be 1": lambda: gradients(
            {**block, "gradient": np.ones_like(given["gradient"])}, p, output.sum(-1, keepdims=True)
        ),
        "dS is not multiplied by P": lambda: gradients(
            block, p, delta, ds=(dp - delta) * block["query"].shape[-1] ** -0.5 * computed
        ),
        "dV is dSᵀ dO: it is Pᵀ dO": lambda: swapped(
            "value", rows.swapaxes(-1, -2) @ given["gradient"]
        ),
        "dK is dSᵀ dO: it is dSᵀ Q": lambda: swapped(
            "key", rows.swapaxes(-1, -2) @ given["gradient"]
        ),
        "dK is Pᵀ Q: it is dSᵀ Q": lambda: swapped("key", p.swapaxes(-1, -2) @ block["query"]),
        "dQ is P K: it is dS K": lambda: swapped("query", p @ block["key"]),
        "the gradients of key and value are exchanged": lambda: {
            "query": right["query"],
            "key": right["value"],
            "value": right["key"],
        },
        "the gradients are not in the order query, key, value": lambda: {
            "query": right["value"],
            "key": right["query"],
            "value": right["key"],
        },
        "the weights are exp(score): lse is not subtracted": lambda: gradients(
            block, np.exp(np.minimum(scores, 700)), delta
        ),
        "dS is not divided by √d": lambda: gradients(block, p, delta, 1.0),
        "dS is divided by d": lambda: gradients(block, p, delta, 1 / block["query"].shape[-1]),
        "the weights are exp(score), with scores that are not divided by √d": lambda: gradients(
            block, np.exp(np.minimum(scores_of(block, seen, 1.0) - lse[..., None], 700)), delta
        ),
        "a tile's terms replace those of the tiles before, and are not added to them": lambda: (
            gradients(block, p * last_rows[:, None], delta)
            | {"query": gradients(block, p * last_keys, delta)["query"]}
        ),
        "the last tile of queries, which is not full, is left out": lambda: gradients(
            block, p * (np.arange(queries) < max(TILE, queries // TILE * TILE))[:, None], delta
        ),
        "the last tile of keys, which is not full, is left out": lambda: gradients(
            block, p * (np.arange(keys) < max(TILE, keys // TILE * TILE)), delta
        ),
    }
    if causal:
        wrong |= {
            story: partial(masked, mask) for story, mask in wrong_masks(queries, keys).items()
        }
    return wrong


def expect_gradients(found: Arrays, given: Arrays) -> None:
    """Raise `Wrong` unless the three gradients are right."""
    output, lse, block, seen = forward_of_all(given)
    p = np.exp(scores_of(block, seen) - lse[..., None])
    expected = gradients(block, p, (given["gradient"] * output).sum(-1, keepdims=True))
    wrong = wrong_gradients(given)
    for name in ("value", "query", "key"):  # of value first: it needs the weights alone
        instead = {
            story: partial(lambda make, name: make()[name], make, name)
            for story, make in wrong.items()
        }
        with np.errstate(all="ignore"):
            expect_close(0, f"the gradient of {name}", found[name], expected[name], instead=instead)


def judge_backward(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """As the formulas, written out."""
    given, found = case.given[0], results[0]
    expect_gradients(found, given)
    return {"bytes held by backward": expect_tiles(found, forward_of_all(given)[2], 5, 8)}


def run_function(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4b; after forward and after backward, see what is held."""
    leaves = [x.requires_grad_() for x in tensors(given, QKV)]
    gradient, account = torch.from_numpy(given["gradient"].copy()), Account()
    with Meter(*leaves, gradient) as meter:
        with account.recording():
            output = exercise.flash_attention(*leaves, bool(given["causal"]))
            expect_tensor(output, "what flash_attention returns", 4)
        saved, held = account.now["activations"], held_by(meter)
        if output.grad_fn is None:
            raise Wrong(
                "the output has no gradient: `flash_attention` is to return what the function's "
                "apply returns"
            )
        try:
            with suppress(NotImplementedError):
                output.backward(gradient)
        except RuntimeError as error:
            if "incorrect number of gradients" not in str(error):
                raise
            raise Wrong(
                f"{error}: backward returns one value for each argument of forward, None for causal"
            ) from error
    found = {
        "output": output.detach().numpy(),
        "saved": saved,
        "held": held,
        "after": held_by(meter),
    }
    for name, leaf in zip(QKV, leaves, strict=True):
        if leaf.grad is None:
            raise Wrong(f"backward leaves no gradient of {name}")
        found[name] = leaf.grad.numpy()
    return found | measured(meter) | {"largest": meter.largest[1]}


def held_by(meter: Meter) -> int:
    """Return what is still held, of what has been computed."""
    gc.collect()
    return meter.held()


def judge_function(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> Figures:
    """As attention written out; what autograd saves is linear in T."""
    given, found = case.given[0], results[0]
    output, lse, _, seen = forward_of_all(given)
    instead: dict[str, Any] = wrong_outputs(given, seen, cuts_of(seen.shape[1]))
    instead |= {} if seen.all() else wrongly_masked(given, seen)
    expect_close(0, "the output", found["output"], output, instead=instead)
    expect_gradients(found, given)
    linear, new = sum(given[name].nbytes for name in QKV), output.nbytes + lse.nbytes
    saved, matrix = int(found["saved"]), 8 * seen.size * int(np.prod(lse.shape[:2]))
    for bytes, most, who in (
        (saved, linear + new, "autograd saves"),
        (int(found["held"]), new, "besides the arguments"),
    ):
        if bytes > most:
            why = (
                "compute inside an autograd.Function, which records nothing, and save five tensors"
            )
            tiles = (
                f": a matrix of all weights has {matrix:,}" if bytes - most >= matrix // 3 else ""
            )
            raise Wrong(
                f"{who} {bytes:,} bytes from forward to backward, expected at most "
                f"{most:,}{tiles}: {why}"
            )
    if matrix := found["matrix"].tolist():
        raise Wrong(
            f"a tensor of shape {tuple(matrix)} is made: no weights of all queries and keys, but "
            "a tile"
        )
    after = int(found["after"]) - output.nbytes - sum(given[name].nbytes for name in QKV)
    if after > 0:
        raise Wrong(
            f"after backward {after:,} bytes are still held, while somebody has the output: keep "
            "tensors by ctx.save_for_backward, which lets them go"
        )
    return {"bytes saved for backward": saved}

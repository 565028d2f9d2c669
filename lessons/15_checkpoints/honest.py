"""Lesson 15 answered by hand, from the handout alone: who writes what, all or nothing, any layout,
and how often.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from minidist import Communicator

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Held:
    """A parameter of the serial model, and how it is spread over a mesh of dp x tp."""

    shape: tuple[int, ...]
    cut: bool  # rows over tp
    sliced: bool  # elements of that block over dp


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `start + len(values)` of a whole tensor of `shape`, flattened."""

    shape: tuple[int, ...]
    start: int
    values: Tensor


def pieces_to_write(
    tensors: Mapping[str, Held], dp: Communicator, tp: Communicator
) -> dict[str, tuple[int, int]]:
    """Task 1: return (start, stop) of the elements that this rank writes."""
    found = {}
    for name, held in tensors.items():
        if not held.cut and tp.rank > 0:
            continue  # tp rank 0 has the same
        if not held.sliced and dp.rank > 0:
            continue  # dp rank 0 has the same
        count = math.prod(held.shape) // (tp.size if held.cut else 1)
        start = count * tp.rank if held.cut else 0
        stop = start + count
        if held.sliced:
            length, longer = divmod(count, dp.size)
            start += dp.rank * length + min(dp.rank, longer)
            stop = start + length + (dp.rank < longer)
        if start < stop:
            found[name] = (start, stop)
    return found


def save(
    folder: Path,
    step: int,
    pieces: Mapping[str, Piece],
    state: Mapping[str, Any],
    comm: Communicator,
) -> None:
    """Task 2: write the checkpoint of a step, all of it or nothing."""
    final, aside = folder / f"step-{step:08}", folder / f".unfinished-{step:08}"
    if comm.all_gather_object(final.exists())[0]:
        raise FileExistsError(f"{final} is there already, and nothing is ever overwritten")
    if comm.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".unfinished*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        aside.mkdir()
    comm.barrier()

    file = f"rank-{comm.rank:04}.safetensors"
    if pieces:
        save_file({name: piece.values.clone() for name, piece in pieces.items()}, aside / file)
        _flush(aside / file)
    mine = [
        (
            name,
            str(piece.values.dtype).removeprefix("torch."),
            list(piece.shape),
            piece.start,
            len(piece.values),
        )
        for name, piece in pieces.items()
    ]
    everybody = comm.all_gather_object((file, mine))  # and so everybody has written
    if comm.rank == 0:
        tensors: dict[str, Any] = {}
        for file, written in everybody:
            for name, dtype, shape, start, length in written:
                tensor = tensors.setdefault(
                    name, {"dtype": dtype, "shape": shape, "dim": None, "pieces": []}
                )
                tensor["pieces"].append(
                    {"file": file, "block": [0, 0], "elements": [start, start + length]}
                )
        _write_json(aside / "index.json", {"tensors": tensors})
        _write_json(aside / "state.json", {**state, "step": step})
        _flush(aside)
        aside.rename(final)
        _flush(folder)
    comm.barrier()


def _write_json(path: Path, content: Any) -> None:
    """Write a file, and wait until the disk has it."""
    path.write_text(json.dumps(content))
    _flush(path)


def _flush(path: Path) -> None:
    """Return when the disk has this file, or the names in this folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(
    wanted: Mapping[str, tuple[int, int]],
    stored: Mapping[str, tuple[int, list[tuple[int, int, str]]]],
    read: Callable[[str, str, int, int], Tensor],
) -> dict[str, Tensor]:
    """Task 3: return what this rank wants of every tensor, put together from what others have
    stored.
    """
    pieces_of = {}
    for name, (_, last) in wanted.items():
        if name not in stored:
            raise ValueError(f"{name!r} is not stored")
        count, pieces = stored[name]
        pieces_of[name] = sorted(piece for piece in pieces if piece[0] < piece[1])
        covered = 0
        for start, stop, file in pieces_of[name]:
            if start != covered:
                raise ValueError(
                    f"{name!r}: {file} goes on with element {start}, the pieces before end at "
                    f"{covered}"
                )
            covered = stop
        if covered != count or last > count:
            raise ValueError(
                f"{name!r} has {count} elements; stored are {covered}, wanted up to {last}"
            )

    found = {}
    for name, (first, last) in wanted.items():
        parts = [torch.empty(0, dtype=torch.float64)]
        for start, stop, file in pieces_of[name]:
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                parts.append(read(file, name, begin - start, end - start))
        found[name] = torch.cat(parts)
    return found


class Run(Protocol):
    """A training run: AdamW with dropout, over shuffled rows."""

    weights: dict[str, Array]
    mean: dict[str, Array]
    square: dict[str, Array]
    step: int
    generator: np.random.Generator
    order: Array
    position: int


def state_of(run: Run) -> tuple[dict[str, Array], dict[str, Any]]:
    """Task 4: return what has to be saved of a run: arrays by name, and the rest as plain data."""
    arrays = {"order": run.order.copy()}
    for kind, group in (("weights", run.weights), ("mean", run.mean), ("square", run.square)):
        for name, array in group.items():
            arrays[f"{kind}/{name}"] = array.copy()
    facts = {
        "step": run.step,
        "position": run.position,
        "generator": run.generator.bit_generator.state,
    }
    return arrays, facts


def restore(run: Run, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
    """Task 4: make a run go on as the saved one would have."""
    for kind, group in (("weights", run.weights), ("mean", run.mean), ("square", run.square)):
        for name in group:
            group[name] = arrays[f"{kind}/{name}"].copy()
    run.order = arrays["order"].copy()
    run.step, run.position = facts["step"], facts["position"]
    run.generator.bit_generator.state = facts["generator"]


def interval(write_seconds: float, mtbf_seconds: float, ranks: int) -> float:
    """Task 5: return Young's interval between checkpoints."""
    return math.sqrt(2 * write_seconds * mtbf_seconds / ranks)


def shares(
    compute_seconds: float, write_seconds: float, mtbf_seconds: float, restart_seconds: float
) -> tuple[float, float, float]:
    """Task 5: return which shares of a long run's time go into (training, writing, what failures
    cost).
    """
    attempt = (compute_seconds + write_seconds) / mtbf_seconds
    total = mtbf_seconds * math.exp(restart_seconds / mtbf_seconds) * math.expm1(attempt)
    training, writing = compute_seconds / total, write_seconds / total
    return training, writing, 1 - training - writing

"""Lesson 15: checkpoints of many ranks, which a crash cannot ruin and another layout of ranks can read.

    checkpoints/step-00000042/     rank-0000.safetensors   rank-0001.safetensors   index.json   state.json

Fill in the functions; their docstrings are the contract. `minidist.trainer` is what you are building: calling it scores
nothing. From the standard library you need `json`, `os` and `shutil`, and `save_file` of safetensors.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 15             points, and what is still wrong
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import save_file  # save_file({"name": tensor}, path)  # noqa: F401
from torch import Tensor

import minidist
from minidist import Communicator

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Held:
    """A parameter of the serial model, and how it is spread over a mesh of dp x tp."""

    shape: tuple[int, ...]
    cut: bool  # tensor parallelism deals its rows out in tp equal blocks, first rows to rank 0; else each has them all
    sliced: bool  # ZeRO deals the elements of that block out over dp, flattened; else all dp ranks have the block


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `start + len(values)` of a whole tensor of `shape`, flattened."""

    shape: tuple[int, ...]
    start: int
    values: Tensor  # one-dimensional, float64


# ---------------------------------------------------------------- task 1: who writes what


def pieces_to_write(tensors: Mapping[str, Held], dp: Communicator, tp: Communicator) -> dict[str, tuple[int, int]]:
    """Task 1: return (start, stop) of the elements that this rank writes, of every tensor of which it writes some.

    Elements are numbered as in the whole tensor, flattened: a tensor of shape (4, 6) has 0 to 24, and its second row is
    (6, 12). Of a block of n elements, ZeRO's slices have the lengths of `numpy.array_split`: n divided by dp, the first
    ones longer by one if that leaves a remainder; a slice can be empty. Only `dp.rank`, `dp.size`, `tp.rank` and
    `tp.size` are needed: nothing is sent.

    All ranks together must write each element exactly once, and a rank can write only what it holds.
    """
    raise NotImplementedError("task 1 is not started")


# ---------------------------------------------------------------- task 2: all of it or nothing


def save(folder: Path, step: int, pieces: Mapping[str, Piece], state: Mapping[str, Any], comm: Communicator) -> None:
    """Task 2: write the checkpoint of a step into `folder/step-00000042` (eight digits). All ranks call this together.

    Files
    -----
    rank-0003.safetensors : from each rank that has pieces, written by itself: `values` by name.
    index.json : of each tensor its dtype and shape, and which file has which of its elements, from all ranks:
        {"tensors": {"weight": {"dtype": "float64", "shape": [4, 6], "dim": null, "pieces": [
            {"file": "rank-0000.safetensors", "block": [0, 0], "elements": [0, 12]},
            {"file": "rank-0001.safetensors", "block": [0, 0], "elements": [12, 24]}]}}}
        `block` is always [0, 0] here and `dim` null (the package also knows blocks of columns).
    state.json : `step`, and everything in `state`.
    Other files may lie beside them.

    Whatever happens
    ----------------
    - A folder whose name begins with `step-` is complete, at every moment: the process may be killed at any of them.
      So write to a folder of another name, `.unfinished-00000042`, and rename it when all ranks have written.
    - Earlier checkpoints stay as they are. Nothing is ever overwritten.
    - When the power fails, files that were renamed can still turn out empty: the system writes later than you do. So
      every file has to be flushed with `os.fsync(descriptor)` after its last byte and before the rename. What is in
      Python's buffer has not been written yet: close the file first, or call its `flush()`.
    - What killed runs left in `folder`, all files and folders that begin with `.unfinished`, is gone afterwards, and
      none of it gets into the new checkpoint.
    - No rank returns before the checkpoint is there.

    Between ranks
    -------------
    `comm.barrier()` returns once every rank has called it. `comm.roll_call(x)` returns the list of every rank's x, by
    rank; x is small plain data such as names, shapes and numbers. Tensors are not sent.

    Raises
    ------
    FileExistsError
        On every rank, if there is a checkpoint of this step already. It stays as it is.
    """
    raise NotImplementedError("task 2 is not started")


# ---------------------------------------------------------------- task 3: into another layout


def load(
    wanted: Mapping[str, tuple[int, int]],
    stored: Mapping[str, tuple[int, list[tuple[int, int, str]]]],
    read: Callable[[str, str, int, int], Tensor],
) -> dict[str, Tensor]:
    """Task 3: return what this rank wants of every tensor, put together from what others have stored.

    Parameters
    ----------
    wanted : mapping
        By name: (start, stop), the elements that this rank needs. It can be none.
    stored : mapping
        By name: how many elements the whole tensor has, and its pieces (start, stop, file), in any order.
    read : callable
        `read(file, name, first, last)` reads elements `first` to `last` *of the piece that lies in this file*, as a
        one-dimensional float64 tensor. The piece (6, 12) has the elements 0 to 6.

    Cost
    ----
    At most one read of each piece, and only of elements that are wanted.

    Raises
    ------
    ValueError
        If a wanted tensor is not stored, or its pieces do not have each of its elements, whether wanted or not,
        exactly once. Before anything is read of any tensor.
    """
    raise NotImplementedError("task 3 is not started")


# ---------------------------------------------------------------- task 4: all that a run is


class Run(Protocol):
    """A training run: AdamW with dropout, over shuffled rows. What `take_step` does depends on these and on no more."""

    weights: dict[str, Array]
    mean: dict[str, Array]  # Adam's first moments, by the names of the weights
    square: dict[str, Array]  # and second moments
    step: int  # how many are taken: Adam corrects its moments by it
    generator: np.random.Generator  # draws dropout, and the order of the next epoch
    order: Array  # of this epoch's rows
    position: int  # of the next batch in `order`


def state_of(run: Run) -> tuple[dict[str, Array], dict[str, Any]]:
    """Task 4: return what has to be saved of a run: arrays by name, and the rest as plain data that JSON can hold.

    The arrays are written while training goes on, which changes all of the run's arrays in place, `order` too. So they
    must not be the run's own.
    `generator.bit_generator.state` is a dictionary of numbers and words that can be read and assigned.
    """
    raise NotImplementedError("task 4 is not started")


def restore(run: Run, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
    """Task 4: make a run, just built and with other numbers in it, go on as the saved one would have: to the last bit.

    `facts` has been written as JSON and read again; `arrays` are of the same shapes as were saved. What you assign has
    to be the run's own: later steps change its arrays in place, and `arrays` must not change with it.
    """
    raise NotImplementedError("task 4 is not started")


# ---------------------------------------------------------------- task 5: how often


def interval(write_seconds: float, mtbf_seconds: float, ranks: int) -> float:
    """Task 5: return Young's interval between checkpoints: the seconds of computing before each.

    `mtbf_seconds` is the mean time between failures of *one* rank. They fail independently, and any that fails stops
    all of them.
    """
    raise NotImplementedError("task 5 is not started")


def shares(
    compute_seconds: float, write_seconds: float, mtbf_seconds: float, restart_seconds: float
) -> tuple[float, float, float]:
    """Task 5: return which shares of a long run's time go into (training, writing, what failures cost).

    The run computes for `compute_seconds` and then writes for `write_seconds`, again and again. `mtbf_seconds` M is
    that of the whole job. By the lesson's formula an interval takes, with its failures, on average
    M e^(R/M) (e^((compute + write)/M) - 1) seconds, where R is `restart_seconds`.
    """
    raise NotImplementedError("task 5 is not started")


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    alone = comm.split(comm.rank)
    held = {"weight": Held((4, 6), cut=False, sliced=True), "norm": Held((6,), cut=False, sliced=False)}

    def task_1() -> str:
        return f"this rank writes {pieces_to_write(held, comm, alone)}"

    def task_2() -> str:
        with tempfile.TemporaryDirectory() as mine:
            folder = Path(comm.roll_call(mine)[0])  # rank 0's
            values = torch.full((2,), float(comm.rank), dtype=torch.float64)
            save(folder, 42, {"weight": Piece((comm.size, 2), 2 * comm.rank, values)}, {"loss": 1.5}, comm)
            names = sorted(path.name for path in folder.rglob("*"))
            comm.barrier()  # until here nobody removes it
        return f"wrote {' '.join(names)}"

    def task_3() -> str:
        stored = {"weight": (24, [(0, 12, "rank-0000"), (12, 24, "rank-0001")])}
        found = load({"weight": (8, 16)}, stored, lambda file, name, first, last: torch.arange(first, last).double())
        return f"elements 8 to 16: {found['weight'].tolist()}"

    def task_4() -> str:
        weights = {"w": np.ones(2)}
        facts = {"step": 3, "generator": np.random.default_rng(0), "order": np.arange(4), "position": 2}
        arrays, rest = state_of(SimpleNamespace(weights=weights, mean=weights, square=weights, **facts))
        return f"{len(arrays)} arrays and {', '.join(rest)}"

    def task_5() -> str:
        every = interval(60.0, 5 * 365 * 86400.0, 1024)
        return f"1,024 ranks: save every {every:.0f} s; shares {shares(every, 60.0, 5 * 365 * 86400 / 1024, 300.0)}"

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()

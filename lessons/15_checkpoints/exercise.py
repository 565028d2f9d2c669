"""Lesson 15: checkpoints of many ranks that a crash cannot break and that another layout of ranks
can read.

    checkpoints/step-00000042/     rank-0000.safetensors   rank-0001.safetensors   index.json   state.json

Fill in the functions; their docstrings are the contract. You are building parts of
`minidist.full.trainer`, so calling anything in it scores nothing. You need `json`, `os` and `shutil`
from the standard library, and `save_file` of safetensors.

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
    # True: split by rows into tp equal blocks, tp rank 0 holds the first; False: each tp rank holds
    # all rows
    cut: bool
    # True: ZeRO splits that block, flattened, over the dp ranks; False: each dp rank holds all of
    # it
    sliced: bool


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `start + len(values)` (exclusive) of a whole tensor of `shape`,
    flattened.
    """

    shape: tuple[int, ...]
    start: int
    values: Tensor  # one-dimensional, float64


# ---------------------------------------------------------------- task 1: who writes what


def pieces_to_write(
    tensors: Mapping[str, Held], dp: Communicator, tp: Communicator
) -> dict[str, tuple[int, int]]:
    """Task 1: return, by name, (start, stop) of the elements of each tensor that this rank has to
    write.

    All ranks together must write each element exactly once, and a rank can write only elements that
    it holds. Leave out the tensors of which this rank writes nothing.

    Elements are numbered as in the whole tensor, flattened; `stop` is exclusive. A tensor of shape
    (4, 6) has the elements (0, 24), and its second row is (6, 12). ZeRO cuts a block of n elements
    into slices with the lengths of `numpy.array_split`: n divided by dp, and the first slices are
    longer by one if the division leaves a remainder. A slice can be empty. You need only `dp.rank`,
    `dp.size`, `tp.rank` and `tp.size`: send nothing.
    """
    raise NotImplementedError("task 1 is not started")


# ---------------------------------------------------------------- task 2: all of it or nothing


def save(
    folder: Path,
    step: int,
    pieces: Mapping[str, Piece],
    state: Mapping[str, Any],
    comm: Communicator,
) -> None:
    """Task 2: write the checkpoint of a step into `folder/step-00000042` (eight digits). All ranks
    call `save` together.

    Files
    -----
    rank-0003.safetensors : each rank that has pieces writes its own file: the `values` of its
    pieces, by name.
    index.json : for each tensor its dtype and shape, and which file has which of its elements, from
    all ranks:
        {"tensors": {"weight": {"dtype": "float64", "shape": [4, 6], "dim": null, "pieces": [
            {"file": "rank-0000.safetensors", "block": [0, 0], "elements": [0, 12]},
            {"file": "rank-0001.safetensors", "block": [0, 0], "elements": [12, 24]}]}}}
        `block` is always [0, 0] here and `dim` null (the package also knows blocks of columns).
    state.json : `step`, and everything in `state`.
    Other files may lie beside them.

    Whatever happens
    ----------------
    - The process may be killed at any moment. At every moment, each folder whose name begins with
      `step-` must be complete. So write into a folder of another name, `.unfinished-00000042`, and
      rename it when all ranks have written.
    - Older checkpoints stay as they are. Never overwrite anything.
    - After a power failure, a renamed file can be empty, because the system writes to the disk
      later than you call `write`. So call `os.fsync(descriptor)` for every file after its last byte
      and before the rename. Bytes in Python's buffer have not been written yet: close the file
      first, or call its `flush()`.
    - Killed runs leave files and folders in `folder` whose names begin with `.unfinished`. When
      `save` returns, all of them are gone, and none of their content is in the new checkpoint.
    - No rank returns before the checkpoint is complete.

    Between ranks
    -------------
    `comm.barrier()` returns once every rank has called it. `comm.all_gather_object(x)` returns the list of
    every rank's x, in the order of the ranks. x is small plain data such as names, shapes and
    numbers. Do not send tensors.

    Raises
    ------
    FileExistsError
        On every rank, if there is already a checkpoint of this step. That checkpoint stays as it
        is.
    """
    raise NotImplementedError("task 2 is not started")


# ---------------------------------------------------------------- task 3: into another layout


def load(
    wanted: Mapping[str, tuple[int, int]],
    stored: Mapping[str, tuple[int, list[tuple[int, int, str]]]],
    read: Callable[[str, str, int, int], Tensor],
) -> dict[str, Tensor]:
    """Task 3: return by name the elements that this rank wants of each tensor, put together from
    the stored pieces.

    Parameters
    ----------
    wanted : mapping
        By name: (start, stop), the elements that this rank needs. The range can be empty.
    stored : mapping
        By name: how many elements the whole tensor has, and its pieces (start, stop, file), in any
        order.
    read : callable
        `read(file, name, first, last)` returns the elements `first` to `last` (exclusive) as a
        one-dimensional float64 tensor. Here elements are numbered *within the piece that lies in
        this file*: the piece (6, 12) has the elements 0 to 6.

    Cost
    ----
    Read each piece at most once, and read only elements that are wanted.

    Raises
    ------
    ValueError
        If a wanted tensor is not stored, or if its pieces do not have each of its elements, wanted
        or not, exactly once. Check this for all wanted tensors before you read anything.
    """
    raise NotImplementedError("task 3 is not started")


# ---------------------------------------------------------------- task 4: all that a run is


class Run(Protocol):
    """A training run: AdamW with dropout, over shuffled rows. Its next step depends on these
    attributes and nothing else.
    """

    weights: dict[str, Array]
    mean: dict[str, Array]  # Adam's first moments, by the names of the weights
    square: dict[str, Array]  # Adam's second moments, by the names of the weights
    step: int  # how many steps have been taken: Adam corrects its moments by this number
    generator: np.random.Generator  # draws the dropout masks, and the order of the next epoch
    order: Array  # the order of this epoch's rows
    position: int  # where the next batch begins in `order`


def state_of(run: Run) -> tuple[dict[str, Array], dict[str, Any]]:
    """Task 4, first half: return what has to be saved of a run: (arrays, facts).

    `arrays` is a dictionary of arrays; you choose the names, and they must differ. `facts` is a
    dictionary of the rest, as plain data that JSON can hold.

    The arrays are written while training goes on, and training changes all arrays of the run in
    place, also `order`. So return copies. `generator.bit_generator.state` is a dictionary of
    numbers and words; you can read it and assign it.
    """
    raise NotImplementedError("task 4 is not started")


def restore(run: Run, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
    """Task 4, second half: change `run` so that it goes on exactly as the saved run would have, to
    the last bit.

    `run` has just been built and has other numbers in it. `arrays` and `facts` are what `state_of`
    returned for the saved run; `facts` has been written as JSON and read again. Give `run` copies:
    its later steps change its arrays in place, and `arrays` must not change with them.
    """
    raise NotImplementedError("task 4 is not started")


# ---------------------------------------------------------------- task 5: how often


def interval(write_seconds: float, mtbf_seconds: float, ranks: int) -> float:
    """Task 5, first half: return Young's interval τ = √(2 δ M): after how many seconds of computing
    to save.

    δ is `write_seconds`. M is the mean time between failures of the *whole job*, in seconds; you
    compute it. `mtbf_seconds` is the mean time between failures of *one* rank. The `ranks` ranks
    fail independently, and one rank that fails stops the whole job. The value returned is a number
    of seconds, not rounded.
    """
    raise NotImplementedError("task 5 is not started")


def shares(
    compute_seconds: float, write_seconds: float, mtbf_seconds: float, restart_seconds: float
) -> tuple[float, float, float]:
    """Task 5, second half: return the shares of a long run's time that go into (training, writing,
    failures).

    Again and again, the run computes for `compute_seconds` and then writes for `write_seconds`.
    Here M, `mtbf_seconds`, is the mean time between failures of the *whole job*, and R is
    `restart_seconds`. With its failures, such an interval takes on average

        whole = M e^(R/M) (e^((compute_seconds + write_seconds)/M) - 1)  seconds.

    Returns
    -------
    (training, writing, failures) : three floats that add up to 1
        training = compute_seconds / whole, writing = write_seconds / whole. The third share is the
        rest of the time: it goes into work that is lost and done again, and into restarts.
    """
    raise NotImplementedError("task 5 is not started")


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    alone = comm.split(comm.rank)
    held = {
        "weight": Held((4, 6), cut=False, sliced=True),
        "norm": Held((6,), cut=False, sliced=False),
    }

    def task_1() -> str:
        return f"this rank writes {pieces_to_write(held, comm, alone)}"

    def task_2() -> str:
        with tempfile.TemporaryDirectory() as mine:
            folder = Path(comm.all_gather_object(mine)[0])  # rank 0's
            values = torch.full((2,), float(comm.rank), dtype=torch.float64)
            save(
                folder,
                42,
                {"weight": Piece((comm.size, 2), 2 * comm.rank, values)},
                {"loss": 1.5},
                comm,
            )
            names = sorted(path.name for path in folder.rglob("*"))
            comm.barrier()  # no rank removes the folder before all ranks have looked into it
        return f"wrote {' '.join(names)}"

    def task_3() -> str:
        stored = {"weight": (24, [(0, 12, "rank-0000"), (12, 24, "rank-0001")])}
        found = load(
            {"weight": (8, 16)},
            stored,
            lambda file, name, first, last: torch.arange(first, last).double(),
        )
        return f"elements 8 to 16: {found['weight'].tolist()}"

    def task_4() -> str:
        weights = {"w": np.ones(2)}
        facts = {
            "step": 3,
            "generator": np.random.default_rng(0),
            "order": np.arange(4),
            "position": 2,
        }
        arrays, rest = state_of(
            SimpleNamespace(weights=weights, mean=weights, square=weights, **facts)
        )
        return f"{len(arrays)} arrays and {', '.join(rest)}"

    def task_5() -> str:
        every = interval(60.0, 5 * 365 * 86400.0, 1024)
        return (
            f"1,024 ranks: save every {every:.0f} s; shares "
            f"{shares(every, 60.0, 5 * 365 * 86400 / 1024, 300.0)}"
        )

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()

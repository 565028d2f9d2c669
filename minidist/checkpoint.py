"""A sharded checkpoint: saved by some ranks, loaded by any number of others, on any layout.

    rank 0   make .unfinished-00000100 ─┬─ write, flush its pieces ─┬─ index and state, flush, rename to step-00000100
    rank 1                              └─ write, flush its pieces ─┘

A rename is one atomic act of the file system, so a kill at any moment leaves what was there before,
or that and the new checkpoint, never half of one. What is flushed (`fsync`) before the rename is on
the disk before the name is: without that, a name may outlive a power failure and what it names may
not.

A *piece* is what a rank holds of a tensor: some elements of a block of it, flattened.

    weight [4, 6], its columns cut by tensor parallelism, each block dealt out by ZeRO

    block 0 1 2 │ block 3 4 5
      a a a     │   c c c         a   dim 1, columns 0 to 3, elements 0 to 7 of that block
      a a a     │   c c c         b   dim 1, columns 0 to 3, elements 7 to 12
      a b b     │   c d d         c   dim 1, columns 3 to 6, elements 0 to 7
      b b b     │   d d d         d   dim 1, columns 3 to 6, elements 7 to 12

Cost: each rank writes what it alone holds, once; nothing is sent but the index. A rank that loads
puts each tensor together from its pieces, and takes its own part of it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidist.collectives import all_gather_object
from minidist.comm import Communicator
from minidist.tensor import Block


class Piece(NamedTuple):
    """Elements `start` to `stop` - 1 of a block of the tensor `name`, flattened, held in `tensor`."""

    name: str
    block: Block
    start: int
    stop: int
    tensor: Tensor


def put(values: Tensor, block: Block, start: int, whole: Tensor) -> None:
    """Write elements of a block, flat, from `start` on, to their places in the whole tensor."""
    part = whole.narrow(block.dim, block.first, block.last - block.first)
    flat = part.flatten()
    flat[start : start + len(values)] = values
    part.copy_(flat.view(part.shape))


def take(block: Block, start: int, stop: int, whole: Tensor) -> Tensor:
    """Return elements of a block of the whole tensor: flat [stop - start]."""
    part = whole.narrow(block.dim, block.first, block.last - block.first)
    return part.flatten()[start:stop]


def save(
    folder: Path, step: int, pieces: Sequence[Piece], state: Mapping[str, Any], comm: Communicator
) -> Path:
    """Save what the ranks hold, and `state`, which must fit into JSON; return the folder.

    Collective. Together, the pieces of all ranks must be each element of each tensor exactly once.

    Raises
    ------
    FileExistsError
        On every rank, if there is a checkpoint of this step: it is never overwritten.
    """
    final, unfinished = folder / f"step-{step:08d}", folder / f".unfinished-{step:08d}"
    if all_gather_object(final.exists(), comm)[0]:
        raise FileExistsError(f"{final} is there already: save to another folder")
    if comm.rank == 0:
        for remains in folder.glob(".unfinished*"):  # left by runs that were killed
            shutil.rmtree(remains)
        unfinished.mkdir(parents=True)
    comm.barrier()  # Now there is a folder to write to.
    file = f"rank-{comm.rank:04d}.pt"
    torch.save([piece.tensor.detach().flatten().clone() for piece in pieces], unfinished / file)
    flush(unfinished / file)
    entries = [
        (name, *block, start, stop, file, place, str(tensor.dtype))
        for place, (name, block, start, stop, tensor) in enumerate(pieces)
    ]
    everyones = all_gather_object(entries, comm)  # Now all files are on the disk.
    if comm.rank == 0:
        index: dict[str, list[Any]] = {}
        for name, *entry in (entry for of_rank in everyones for entry in of_rank):
            index.setdefault(name, []).append(entry)
        for name, content in (("index.json", index), ("state.json", {"step": step, **state})):
            (unfinished / name).write_text(json.dumps(content))
            flush(unfinished / name)
        flush(unfinished)
        unfinished.rename(final)
        flush(folder)
    comm.barrier()  # Now there is a checkpoint.
    return final


def newest(folder: Path) -> Path | None:
    """Return the checkpoint of the latest step in a folder, or None."""
    return max(folder.glob("step-*"), default=None)


def load(path: Path, wanted: Sequence[Piece]) -> dict[str, Any]:
    """Fill the wanted pieces in place, whichever ranks saved them; return the state. Sends nothing.

    Raises
    ------
    KeyError
        If the checkpoint does not have a tensor.
    """
    index = json.loads((path / "index.json").read_text())
    files: dict[str, list[Tensor]] = {}
    for name, block, start, stop, tensor in wanted:
        if name not in index:
            raise KeyError(f"{path} has no {name}: it was saved by another model or optimizer")
        whole = torch.empty(block.shape, dtype=tensor.dtype)
        for shape, dim, first, last, begin, _, file, place, _ in index[name]:
            if tuple(shape) != block.shape:
                raise ValueError(f"{name} is {shape} in {path}, and {list(block.shape)} here")
            if file not in files:
                files[file] = torch.load(path / file, mmap=True, weights_only=True)
            put(
                files[file][place].to(tensor.dtype),
                Block(block.shape, dim, first, last),
                begin,
                whole,
            )
        tensor.detach().view(-1).copy_(take(block, start, stop, whole))
    state: dict[str, Any] = json.loads((path / "state.json").read_text())
    return state


def flush(path: Path) -> None:
    """Wait until the disk holds what was written: a rename must not overtake the data it names."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folder; its file system writes renames to a journal.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

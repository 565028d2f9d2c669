"""A sharded checkpoint: saved by some ranks, loaded by any number of others, on any layout.

    rank 0   make .unfinished-00000100 ─┬─ write, flush its pieces ─┬─ state, flush, rename to step-00000100
    rank 1                              └─ write, flush its pieces ─┘

A rename is atomic: a kill at any moment leaves what was there before, or that and the new checkpoint.
All is flushed (`fsync`) first. Otherwise a power failure could leave the name without its data.

A *piece* is what a rank holds of a tensor: some elements of a block of it, flattened. Here columns of
a weight [4, 6] are cut by tensor parallelism, and each block is dealt out by ZeRO:

    block 0 1 2 │ block 3 4 5
      a a a     │   c c c         a   dim 1, columns 0 to 2, elements 0 to 6 of that block
      a a a     │   c c c         b   dim 1, columns 0 to 2, elements 7 to 11
      a b b     │   c d d         c   dim 1, columns 3 to 5, elements 0 to 6
      b b b     │   d d d         d   dim 1, columns 3 to 5, elements 7 to 11

Each piece is written once, by the first rank that holds it, and only names are sent. A rank that
loads puts each tensor together, and takes its own part.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidist.collectives import all_gather_object
from minidist.comm import Communicator
from minidist.tensor import Block


class Piece(NamedTuple):
    """Elements from `start` on of a block of the tensor `name`, flattened, held in `tensor`."""

    name: str
    block: Block
    start: int
    tensor: Tensor


def places_of(piece: Piece) -> Tensor:
    """Return where the elements of a piece are in the whole tensor, flattened."""
    shape, dim, first, last = piece.block
    numbered = torch.arange(prod(shape)).view(shape)
    block = numbered.narrow(dim, first, last - first).flatten()
    return block[piece.start : piece.start + len(piece.tensor)]


def assemble(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """Put whole tensors together from their pieces, in main memory."""
    whole: dict[str, Tensor] = {}
    for piece in pieces:
        empty = torch.empty(piece.block.shape, dtype=piece.tensor.dtype)
        flat = whole.setdefault(piece.name, empty).view(-1)
        flat[places_of(piece)] = piece.tensor.cpu()
    return whole


def without_copies(pieces: Sequence[Piece], comm: Communicator) -> list[Piece]:
    """Return the pieces that no rank before this one holds, too. Collective."""
    held = [(name, block, start, len(tensor)) for name, block, start, tensor in pieces]
    before = set().union(*all_gather_object(held, comm)[: comm.rank])
    return [piece for piece, place in zip(pieces, held, strict=True) if place not in before]


def save(
    folder: Path, step: int, pieces: Sequence[Piece], state: Mapping[str, Any], comm: Communicator
) -> Path:
    """Save what all ranks hold, and `state`, which must fit into JSON; return the folder."""
    final, unfinished = folder / f"step-{step:08d}", folder / f".unfinished-{step:08d}"
    if comm.rank == 0:
        if final.exists():
            raise FileExistsError(f"{final} is there already: save to another folder")
        for remains in folder.glob(".unfinished*"):  # left by runs that were killed
            shutil.rmtree(remains)
        unfinished.mkdir(parents=True)
    comm.barrier()  # Now there is a folder to write to.
    own = []
    for name, block, start, tensor in without_copies(pieces, comm):
        values = tensor.cpu().clone()  # of a view, torch would write all that it views
        own.append((name, tuple(block), start, values))
    file = unfinished / f"rank-{comm.rank:04d}.pt"
    torch.save(own, file)
    flush(file)
    comm.barrier()  # Now all pieces are on the disk.
    if comm.rank == 0:
        file = unfinished / "state.json"
        file.write_text(json.dumps({"step": step, "ranks": comm.size, **state}))
        flush(file)
        flush(unfinished)
        unfinished.rename(final)
        flush(folder)
    comm.barrier()  # Now there is a checkpoint.
    return final


def newest(folder: Path) -> Path:
    """Return the checkpoint of the latest step in a folder."""
    if not (found := list(folder.glob("step-*"))):
        raise FileNotFoundError(f"there is no step-* in {folder}: nothing was saved there")
    return max(found)


def load(path: Path, wanted: Sequence[Piece]) -> dict[str, Any]:
    """Fill the wanted pieces in place, whichever ranks saved them; return the state. Sends nothing."""
    state: dict[str, Any] = json.loads((path / "state.json").read_text())
    files, ranks = list(path.glob("rank-*.pt")), state.pop("ranks")
    if len(files) != ranks:
        raise ValueError(f"{path} has {len(files)} of {ranks} files rank-*.pt: copy it anew")
    saved = []
    for file in files:
        # Mapped into memory: only what is read below comes from the disk.
        for name, block, start, tensor in torch.load(file, mmap=True, weights_only=True):
            saved.append(Piece(name, Block(*block), start, tensor))
    for piece in wanted:
        found = assemble(each for each in saved if each.name == piece.name)
        if not found:
            raise KeyError(f"{path} has no {piece.name}: it was saved by another model")
        whole, shape = found[piece.name], piece.block.shape
        if whole.shape != shape:
            raise ValueError(f"{piece.name} is {[*whole.shape]} in {path}, and {[*shape]} here")
        piece.tensor.copy_(whole.view(-1)[places_of(piece)])
    return state


def flush(path: Path) -> None:
    """Wait until the disk holds what was written: a rename must not overtake the data it names."""
    if sys.platform == "win32" and path.is_dir():
        return  # Windows opens no folder; its file system writes renames to a journal.
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)

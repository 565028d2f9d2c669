"""A sharded checkpoint on one page: saved by some ranks, loaded by any number of others.

    rank 0   make .unfinished-00000100 ─┬─ write, flush its pieces ─┬─ index and state, flush, rename to step-00000100
    rank 1                              └─ write, flush its pieces ─┘

A rename is one atomic act of the file system, so a kill at any moment leaves what was there before,
or that and the new checkpoint, never half of one. What is flushed (`fsync`) before the rename is on
the disk before the name is: without that, a name may outlive a power failure and what it names may
not.

Cost: each rank writes what it alone holds, once; nothing is sent. A rank that loads reads each
tensor whole, even if it wants only some elements. The files have the format of `store.py` without
checksums, so `restore.read` reads them too.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from minidist.full.checkpoint import index
from minidist.full.checkpoint.pieces import Piece, put, take
from minidist.full.comm import Communicator


def save(
    folder: Path, step: int, pieces: Sequence[Piece], state: Mapping[str, Any], comm: Communicator
) -> Path:
    """Save what the ranks hold, and `state`, which must fit into JSON; return the folder.
    Collective.

    Together, the `pieces` of all ranks must be each element of each tensor exactly once. If there
    is a checkpoint of this step, every rank raises FileExistsError: it is never overwritten.
    """
    final, unfinished = folder / f"step-{step:08d}", folder / f".unfinished-{step:08d}"
    if comm.all_gather_object(final.exists())[0]:
        raise FileExistsError(
            f"{final} is there already and is not overwritten: save to another folder"
        )
    if comm.rank == 0:
        for remains in folder.glob(".unfinished*"):  # of killed runs
            shutil.rmtree(remains) if remains.is_dir() else remains.unlink()
        unfinished.mkdir(parents=True)
    comm.barrier()  # now there is a folder to write to
    mine = [piece for piece in pieces if piece.extent.count]
    if mine:
        file = unfinished / f"rank-{comm.rank:04d}.safetensors"
        save_file({name: tensor.detach().contiguous() for name, _, tensor in mine}, file)
        flush(file)
    # now all are on the disk
    written = comm.all_gather_object(
        {name: (tensor.dtype, extent) for name, extent, tensor in mine}
    )
    if comm.rank == 0:
        files = {f"rank-{rank:04d}.safetensors": held for rank, held in enumerate(written)}
        (unfinished / "index.json").write_text(index.compose(files))
        (unfinished / "state.json").write_text(json.dumps({"step": step, **state}))
        for path in (unfinished / "index.json", unfinished / "state.json", unfinished):
            flush(path)
        unfinished.rename(final)
        flush(folder)
    comm.barrier()  # now there is a checkpoint
    return final


def load(path: Path, wanted: Sequence[Piece]) -> None:
    """Fill the wanted pieces in place from the checkpoint `path`, whichever ranks saved it. Sends
    nothing.
    """
    stored = index.parse((path / "index.json").read_text())
    for name, extent, tensor in wanted:
        whole = torch.empty(stored[name].shape, dtype=stored[name].dtype)
        for part, file in stored[name].pieces:
            with safe_open(path / file, "pt") as opened:
                put(opened.get_tensor(name).flatten(), part, whole)
        tensor.detach().copy_(take(whole, extent).view(tensor.shape))


def flush(path: Path) -> None:
    """Wait until the disk holds what was written: a rename must not overtake the data it names."""
    if sys.platform == "win32" and path.is_dir():
        return  # where a folder cannot be opened, and renames are in the file system's journal
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

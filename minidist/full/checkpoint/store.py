"""Sharded checkpoints, written and found.

The steps of the book's `save` are functions here, so that a thread can call them one by one while
training goes on. One sentence tells what the disk refused or damaged; old checkpoints are removed.

    runs/a/step-00000100/          rank-0000.safetensors  rank-0001.safetensors  ...  index.json  state.json  SHA256SUMS
    runs/a/.unfinished-00000100/   what a killed run was writing, or removing; nobody reads it, the next save clears it

    rank 0   begin ─┬─ write_shard ─┬─ commit ── forget      commit: the index, the checksums, then one rename
    rank 1          └─ write_shard ─┘                        nothing is sent here: the caller waits for `begin`, and
                                                             brings what each `write_shard` returns
                                                             to rank 0

`index.json` says of each tensor its dtype, its shape, and which file has which of its elements. So
a rank reads only the pieces that it needs: its own file, if the layout is the same (`restore.py`).
`SHA256SUMS`, which `sha256sum -c` reads too, tells what the disk has damaged since. Safetensors
holds plain tensors and the rest is JSON, so loading runs no code.

Cost of saving: each rank writes what it alone holds, once, and reads it once for its checksum.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from minidist.checkpoint import flush
from minidist.full.checkpoint import index
from minidist.full.checkpoint.pieces import Extent, Piece
from minidist.full.data.files import reason, retold

INDEX, STATE, SUMS, UNFINISHED = "index.json", "state.json", "SHA256SUMS", ".unfinished"


class CheckpointError(ValueError):
    """A checkpoint cannot be used or written; the message says why, and what to do."""


class DamagedError(CheckpointError):
    """A checkpoint's files are not as they were written."""


class Written(NamedTuple):
    """What one rank has written: plain data, for rank 0."""

    file: str  # "" if the rank had nothing to write
    sha256: str
    pieces: dict[str, tuple[torch.dtype, Extent]]


# ---------------------------------------------------------------- writing


def begin(folder: Path, step: int) -> Path:
    """Remove what killed runs left, and make and return the folder that ranks write to. Rank 0
    calls this.

    Raises
    ------
    CheckpointError
        If the disk refuses, or there is a checkpoint of this step.
    """
    final, unfinished = final_of(folder, step), folder / f"{UNFINISHED}-{step:08d}"
    with _writing(final):
        if final.exists():
            raise CheckpointError(
                f"{final} is there already and is not overwritten: save to another folder"
            )
        for remains in folder.glob(f"{UNFINISHED}*"):
            shutil.rmtree(remains) if remains.is_dir() else remains.unlink()
        unfinished.mkdir(parents=True)
    return unfinished


def write_shard(unfinished: Path, rank: int, pieces: Sequence[Piece]) -> Written:
    """Write a rank's pieces to its file, and wait until the disk holds them. Every rank calls this,
    after `begin`.

    Each element of a tensor must be written once, so only one of several replicas writes. Empty
    pieces are left out.

    Raises
    ------
    CheckpointError
        If the disk is full or refuses. `abandon` removes what was written.
    """
    pieces = [piece for piece in pieces if piece.extent.count]
    tensors = {piece.name: piece.tensor.detach().contiguous() for piece in pieces}
    assert len(tensors) == len(pieces), (
        f"rank {rank} writes a name twice: {sorted(piece.name for piece in pieces)}"
    )
    for name, extent, tensor in pieces:
        assert tensor.numel() == extent.count, (
            f"{name}: {list(tensor.shape)} is not what {extent} says"
        )
    if not pieces:
        return Written("", "", {})
    file = unfinished / f"rank-{rank:04d}.safetensors"
    with _writing(final_of(unfinished.parent, int(unfinished.name.removeprefix(f"{UNFINISHED}-")))):
        save_file(tensors, file)
        flush(file)
        checksum = digest(file)
    return Written(
        file.name, checksum, {name: (tensor.dtype, extent) for name, extent, tensor in pieces}
    )


def commit(folder: Path, step: int, written: Iterable[Written], state: dict[str, Any]) -> Path:
    """Make a checkpoint of what all ranks have written; return its folder. Rank 0 calls this, after
    all `write_shard`.

    `state` is what else the run needs to continue; it must fit into JSON.

    Raises
    ------
    CheckpointError
        If the disk refuses, or a rank wrote to another disk. Earlier checkpoints stay intact.
    AssertionError
        If ranks have not written each element of each tensor exactly once.
    """
    final, unfinished = final_of(folder, step), folder / f"{UNFINISHED}-{step:08d}"
    shards = {shard.file: shard for shard in written if shard.file}
    with ExitStack() as at_the_end, _writing(final):
        at_the_end.callback(abandon, unfinished)  # there is none any more, if all went well
        for name in shards:
            if not (unfinished / name).exists():
                raise OSError(f"rank 0 does not find {name}: all ranks must share the folder")
        (unfinished / INDEX).write_text(
            index.compose({name: shard.pieces for name, shard in shards.items()})
        )
        (unfinished / STATE).write_text(json.dumps({"step": step, **state}, indent=1))
        sums = {name: shard.sha256 for name, shard in shards.items()}
        sums |= {name: digest(unfinished / name) for name in (INDEX, STATE)}
        (unfinished / SUMS).write_text(
            "".join(f"{checksum}  {name}\n" for name, checksum in sorted(sums.items()))
        )
        for path in (unfinished / INDEX, unfinished / STATE, unfinished / SUMS, unfinished):
            flush(path)
        unfinished.rename(final)  # fails if there is one already
        flush(folder)
    return final


def abandon(unfinished: Path) -> None:
    """Remove what was written of a checkpoint that will not be committed, as far as the disk lets
    us.
    """
    shutil.rmtree(unfinished, ignore_errors=True)


def forget(folder: Path, keep: int, every: int = 0) -> None:
    """Remove all checkpoints but the newest `keep` (one at least), and those of each `every`-th
    step if it is not 0.

    Raises
    ------
    CheckpointError
        If one cannot be removed.
    """
    fix = "), the newest is intact: remove them yourself, or keep more of them"
    with retold(
        CheckpointError,
        OSError,
        before=f"old checkpoints in {folder} cannot be removed (",
        after=fix,
    ):
        for old in complete(folder)[: -max(keep, 1)]:
            if every and step_of(old) % every == 0:
                continue
            doomed = old.rename(folder / f"{UNFINISHED}-{step_of(old):08d}")
            flush(folder)  # so that nobody takes a half-removed folder for a checkpoint
            shutil.rmtree(doomed)


# ---------------------------------------------------------------- finding


def final_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is, once it is complete."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def complete(folder: Path) -> list[Path]:
    """Return the finished checkpoints of a folder, oldest first; half-written ones are not among
    them.

    Raises
    ------
    CheckpointError
        If there is a folder, and it cannot be read.
    """
    names: list[str] = []
    unreadable = retold(
        CheckpointError,
        OSError,
        before=f"{folder} cannot be read (",
        after="): give another folder",
    )
    with unreadable, suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(folder)
    found = [
        folder / name
        for name in names
        if re.fullmatch("step-[0-9]+", name) and (folder / name).is_dir()
    ]
    return sorted(found, key=step_of)


def set_aside(folder: Path) -> Path:
    """Rename the newest checkpoint, so that it is none any more; return what it is called now. Rank
    0 calls this.

    Raises
    ------
    CheckpointError
        If the disk refuses.
    """
    path = newest(folder)
    aside, times = path.with_name(f"damaged-{path.name}"), 1
    while aside.exists():  # that of an earlier start
        times += 1
        aside = path.with_name(f"damaged-{path.name}-{times}")
    fix = f"): remove {path} yourself"
    with retold(CheckpointError, OSError, before=f"{path} is damaged (", after=fix):
        path.rename(aside)
    return aside


def newest(folder: Path) -> Path:
    """Return the newest finished checkpoint.

    Raises
    ------
    CheckpointError
        If there is none.
    """
    found = complete(folder)
    if not found:
        raise CheckpointError(
            f"--resume finds no checkpoint in {folder}: start without it, or give the right --save"
        )
    return found[-1]


# ---------------------------------------------------------------- helpers


def digest(file: Path) -> str:
    """Return the checksum of a file, as `sha256sum` does."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@contextmanager
def _writing(final: Path) -> Iterator[None]:
    """Tell what the disk refuses, and which checkpoint is intact."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        there = [path.name for path in complete(final.parent) if path != final]
        intact = (
            f"{there[-1]} is intact: --resume continues from it"
            if there
            else "none was written before"
        )
        raise CheckpointError(
            f"the checkpoint {final} cannot be written ({reason(error)}); {intact}"
        ) from None

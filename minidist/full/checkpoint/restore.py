"""Loading: only the bytes that are needed are read, and a damaged checkpoint changes nothing.

                 stored by 2 ranks        wanted by 3
    layer.0      rank-0000 ─────────────▶ rank 0
                          ╲─────────────▶ rank 1
                 rank-0001 ─────────────▶ rank 1
                          ╲─────────────▶ rank 2

Every rank asks for its own pieces. It opens only the files that have some of them, and reads only
what it needs (see `pieces`): with the layout that wrote the checkpoint, exactly its own bytes.
Nothing is sent and no code is run. A fault is found before the first tensor is changed; one
sentence names it and the fix.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minidist.full.checkpoint import index
from minidist.full.checkpoint.pieces import Extent, Piece, Reader, assemble, flaw, touching
from minidist.full.checkpoint.store import (
    INDEX,
    STATE,
    SUMS,
    CheckpointError,
    DamagedError,
    complete,
    digest,
)
from minidist.full.data.files import FileError, at, check_regular, parse_tree, reason

Parsed = TypeVar("Parsed")


def verify(path: Path, share: slice = slice(None)) -> None:
    """Compare the files of a checkpoint with their checksums: all, or a share, so that ranks can
    divide the work.

    Raises
    ------
    CheckpointError
        If one is missing or damaged.
    """
    for name, checksum in list(_sums(path).items())[share]:
        if _reading(path / name, digest) != checksum:
            raise _damaged(
                path / name, f"is truncated or damaged: its checksum is not the one in {SUMS}"
            )


def read_state(path: Path) -> dict[str, Any]:
    """Return the `state` that was given to `commit`, and the step; CheckpointError if it is
    damaged.
    """
    return _parsed(path / STATE, parse_tree)


def state_at(path: Path, state: dict[str, Any], *keys: str, **what: Any) -> Any:
    """Return a value in a checkpoint's state as `files.at` does; CheckpointError if it is missing
    or another kind.
    """
    try:
        return at(state, *keys, **what)
    except FileError as error:
        raise _damaged(path / STATE, str(error)) from None


def names(path: Path, site: str = "") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each whole tensor of a site (see `site_of`); CheckpointError if the
    index is damaged.
    """
    return {
        name.removeprefix(site): (tensor.dtype, tensor.shape)
        for name, tensor in _index(path).items()
        if name.startswith(site)
    }


def read(path: Path, wanted: Sequence[Piece], site: str = "") -> None:
    """Fill the tensors of the wanted pieces of a site (see `site_of`), in place, whatever layout
    wrote them. Checksums are left to `verify`.

    Raises
    ------
    CheckpointError
        If the checkpoint is damaged, or another model's. Nothing has been changed then.
    """
    stored = _index(path)
    wanted = [piece._replace(name=site + piece.name) for piece in wanted if piece.extent.count]
    opened = functools.cache(lambda name: _reading(path / name, lambda file: safe_open(file, "pt")))
    for name, extent, tensor in wanted:
        here = words(tensor.dtype, extent.shape)
        there = "missing"
        if name in stored:
            there = words(stored[name].dtype, stored[name].shape)
        if there != here:
            raise other_model(path, name, there, here)
    sources = [
        list(_readers(path, piece.name, stored[piece.name], piece.extent, opened))
        for piece in wanted
    ]
    with torch.no_grad():
        for (name, extent, tensor), readers in zip(wanted, sources, strict=True):
            content = assemble(extent, readers, stored[name].dtype)
            tensor.copy_(content.view(tensor.shape))


def _readers(
    path: Path, name: str, stored: index.Stored, wanted: Extent, opened: Callable[[str], Any]
) -> Iterator[tuple[Extent, Reader]]:
    """Yield the pieces that may be needed, each with a function that reads part of it; check that
    they are there.
    """
    if fault := flaw([extent for extent, _ in stored.pieces]):
        raise _damaged(path / INDEX, f"does not say where each element of {name} is: {fault}")
    for extent, file in stored.pieces:
        if not touching(extent, wanted):
            continue
        held = opened(file)
        there = name in held.keys()  # noqa: SIM118  # it is no dictionary
        # a view of a mapped file: not yet read
        tensor = held.get_tensor(name).view(-1) if there else torch.empty(0)
        if (tensor.dtype, tensor.numel()) != (stored.dtype, extent.count):
            said = words(stored.dtype, (extent.count,))
            raise _damaged(path / file, f"lacks {said} of {name}, which {INDEX} says it has")
        yield extent, functools.partial(_some, tensor)


def _some(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor[start:stop]


# ---------------------------------------------------------------- files


def _index(path: Path) -> dict[str, index.Stored]:
    return _parsed(path / INDEX, index.parse)


def _sums(path: Path) -> dict[str, str]:
    """Return the checksum of each file of a checkpoint."""
    lines = _parsed(path / SUMS, str.splitlines)
    sums = {}
    for line in lines:
        checksum, _, name = line.partition("  ")
        sums[name] = checksum
    needed = {INDEX, STATE} | {
        file for stored in _index(path).values() for _, file in stored.pieces
    }
    if sums.keys() != needed:
        raise _damaged(path / SUMS, f"or {INDEX} is damaged: they do not name the same files")
    return sums


def _parsed(file: Path, parse: Callable[[str], Parsed]) -> Parsed:
    content = _reading(file, Path.read_bytes)
    try:
        return parse(content.decode())
    except ValueError:
        raise _damaged(file, "is damaged: it is not what was written") from None


def _reading(file: Path, read: Callable[[Path], Parsed]) -> Parsed:
    try:
        check_regular(file)
        return read(file)
    except (OSError, SafetensorError) as error:
        raise _damaged(file, f"cannot be read ({reason(error)})") from None


def _damaged(file: Path, words: str) -> DamagedError:
    """Return the error that says what is wrong with a file of a checkpoint, and what to do."""
    path = file.parent
    earlier = [other.name for other in complete(path.parent) if other.name < path.name]
    afresh = "there is no earlier one: start afresh, with another --save"
    fix = f"remove {path.name} to resume from {earlier[-1]}" if earlier else afresh
    return DamagedError(f"{file} {words}: {fix}")


def other_model(
    path: Path,
    name: str,
    there: object,
    here: object,
) -> CheckpointError:
    """Return the error to raise where a checkpoint does not have what this run has."""
    fix = "use the options it was trained with, or another --save"
    return CheckpointError(
        f"{path} belongs to another model: {name} is {there} there and {here} here: {fix}"
    )


def words(dtype: torch.dtype, shape: Iterable[int]) -> str:
    """Return dtype and shape for people to read."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"

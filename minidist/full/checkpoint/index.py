"""The index of a checkpoint: of each tensor its dtype, its shape, and which file has which of its
elements.

    {"tensors": {
    "norm.weight": {"dtype": "float32", "shape": [6], "dim": null, "pieces": [
        {"file": "rank-0000.safetensors", "block": [0, 0], "elements": [0, 4]},
        {"file": "rank-0001.safetensors", "block": [0, 0], "elements": [4, 6]}]},
    ...

`block` and `elements` are `first`, `last` and `start`, `stop` of an `Extent`. The tensor of that
name in the file has exactly these elements, flat or in the block's shape.

Only `compose` and `parse` know this format. It has no version number, so whoever changes it must
still read what is already on disks.
"""

import json
from typing import Any, NamedTuple

import torch

from minidist.full.checkpoint.pieces import Extent, flaw
from minidist.full.data.files import at, parse_tree


class Stored(NamedTuple):
    """What the index says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[tuple[Extent, str]]  # with the file of each


def compose(held: dict[str, dict[str, tuple[torch.dtype, Extent]]]) -> str:
    """Return the text of an index, one tensor a line, given what each file holds.

    Raises
    ------
    AssertionError
        If the files do not hold each element of each tensor exactly once.
    """
    found: dict[str, list[tuple[torch.dtype, Extent, str]]] = {}
    for file, pieces in held.items():
        for name, (dtype, extent) in pieces.items():
            found.setdefault(name, []).append((dtype, extent, file))
    lines = []
    for name, parts in found.items():
        words = flaw([extent for _, extent, _ in parts])
        assert not words, f"ranks have not written each element of {name} once: {words}"
        assert len({dtype for dtype, _, _ in parts}) == 1, (
            f"ranks have written {name} with different dtypes"
        )
        dtype, extent, _ = parts[0]
        held_by = [
            {
                "file": file,
                "block": [piece.first, piece.last],
                "elements": [piece.start, piece.stop],
            }
            for _, piece, file in parts
        ]
        kind = str(dtype).removeprefix("torch.")
        entry = {
            "dtype": kind,
            "shape": extent.shape,
            "dim": extent.dim,
            "pieces": held_by,
        }
        lines.append(f"{json.dumps(name)}: {json.dumps(entry)}")
    return '{"tensors": {\n' + ",\n".join(lines) + "\n}}\n"


def parse(text: str) -> dict[str, Stored]:
    """Return what an index says, by tensor.

    Raises
    ------
    ValueError
        If it is not an index. `flaw` says whether all elements of a tensor are there.
    """
    tensors = at(parse_tree(text), "tensors", kind=dict)
    return {name: _stored(entry) for name, entry in tensors.items()}


def _stored(entry: Any) -> Stored:
    dtype = getattr(torch, at(entry, "dtype", kind=str), None)
    shape = at(entry, "shape", kind=tuple[int, ...])
    pieces = at(entry, "pieces", kind=list)
    if not isinstance(dtype, torch.dtype) or min(shape, default=0) < 0 or not pieces:
        raise ValueError("a tensor has a dtype, a shape, and pieces")
    dim = at(entry, "dim", kind=int, default=None)
    found = []
    for piece in pieces:
        block = at(piece, "block", kind=tuple[int, int])
        elements = at(piece, "elements", kind=tuple[int, int])
        file = at(piece, "file", kind=str)
        if not file.startswith("rank-") or "/" in file:
            raise ValueError(f"{file} is not the name of a file with pieces")
        found.append((Extent(shape, dim, *block, *elements), file))
    return Stored(dtype, shape, found)

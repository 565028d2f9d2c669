"""Lesson 15, solved: the package's records of who holds what, the steps of its checkpoint, its
pieces, its cadence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minidist import Communicator
from minidist.full.checkpoint import cadence, pieces, store
from minidist.full.checkpoint.pieces import Extent
from minidist.full.checkpoint.saving import extent_of
from minidist.full.collectives.fast import cut
from minidist.full.placement import Block, Slice, placement_of, record

Array = np.ndarray[Any, Any]


def pieces_to_write(
    tensors: Mapping[str, Any], dp: Communicator, tp: Communicator
) -> dict[str, tuple[int, int]]:
    """Write down what this rank holds, as the strategies do; of replicas the first writes."""
    found = {}
    for name, held in tensors.items():
        parameter = nn.Parameter(torch.empty(held.shape, device="meta"))
        rows = held.shape[0] // tp.size if held.cut else held.shape[0]
        bounds = (
            tuple((rank * rows, (rank + 1) * rows) for rank in range(tp.size)) if held.cut else ()
        )
        dim, copies = (0, 1) if held.cut else (None, tp.size)
        record(parameter, block=Block(name, parameter.shape, dim, bounds, copies, tp))
        if held.sliced:
            shape = torch.Size((rows, *held.shape[1:]))
            lengths = cut(shape.numel(), dp.size)
            start = sum(lengths[: dp.rank])
            mine = Slice(name, shape, start, start + lengths[dp.rank], dp)
            record(parameter, slice=mine)
        extent = extent_of(parameter).straight()
        if placement_of(parameter).counts and (held.sliced or dp.rank == 0) and extent.count:
            found[name] = (extent.start, extent.stop)
    return found


def save(
    folder: Path, step: int, held: Mapping[str, Any], state: Mapping[str, Any], comm: Communicator
) -> None:
    """Write, flush, and rename when all have: `save` of the book, with an index."""
    final = store.final_of(folder, step)
    if comm.all_gather_object(final.exists())[0]:
        raise FileExistsError(f"{final} is there already: save to another folder")
    if comm.rank == 0:
        store.begin(folder, step)
    comm.barrier()  # Now there is a folder to write to.
    mine = []
    for name, piece in held.items():
        extent = Extent(piece.shape, None, 0, 0, piece.start, piece.start + len(piece.values))
        mine.append(pieces.Piece(name, extent, piece.values))
    shard = store.write_shard(folder / f".unfinished-{step:08d}", comm.rank, mine)
    shards = comm.all_gather_object(shard)  # Now all are on the disk.
    if comm.rank == 0:
        store.commit(folder, step, shards, dict(state))
    comm.barrier()  # Now there is a checkpoint.


def load(
    wanted: Mapping[str, tuple[int, int]],
    stored: Mapping[str, tuple[int, list[tuple[int, int, str]]]],
    read: Callable[[str, str, int, int], Tensor],
) -> dict[str, Tensor]:
    """Look whether all is there, then let `assemble` read what it needs."""
    sources = {}
    for name in wanted:
        if name not in stored:
            raise ValueError(f"{name} is not stored")
        size, parts = stored[name]
        sources[name] = [
            (Extent((size,), None, 0, 0, a, b), partial(read, file, name)) for a, b, file in parts
        ]
        if words := pieces.flaw(
            [Extent((size,), None, 0, 0, 0, 0), *(extent for extent, _ in sources[name])]
        ):
            raise ValueError(f"{name}: {words}")
    return {
        name: pieces.assemble(
            Extent((stored[name][0],), None, 0, 0, start, stop), sources[name], torch.float64
        )
        for name, (start, stop) in wanted.items()
    }


def state_of(run: Any) -> tuple[dict[str, Array], dict[str, Any]]:
    """Copy what changes; a generator is plain data."""
    arrays = {"order": run.order.copy()}
    for kind in ("weights", "mean", "square"):
        arrays |= {f"{kind}/{name}": values.copy() for name, values in getattr(run, kind).items()}
    return arrays, {
        "step": run.step,
        "position": run.position,
        "generator": run.generator.bit_generator.state,
    }


def restore(run: Any, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
    """Put all of it back."""
    for kind in ("weights", "mean", "square"):
        for name, values in getattr(run, kind).items():
            values[...] = arrays[f"{kind}/{name}"]
    run.order, run.step, run.position = arrays["order"].copy(), facts["step"], facts["position"]
    run.generator.bit_generator.state = facts["generator"]


def interval(write_seconds: float, mtbf_seconds: float, ranks: int) -> float:
    """Young's, of the whole job."""
    return cadence.young(write_seconds, mtbf_seconds / ranks)


def shares(
    compute_seconds: float, write_seconds: float, mtbf_seconds: float, restart_seconds: float
) -> tuple[float, float, float]:
    """Daly's exact model."""
    return cadence.shares(compute_seconds, write_seconds, mtbf_seconds, restart_seconds)

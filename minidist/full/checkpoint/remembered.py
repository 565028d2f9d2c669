"""What a strategy over the data axis keeps from step to step, in a checkpoint.

remembered/kept back/2/head.weight     rank 2's own: with fewer ranks, another adds it to its own
remembered/factor/whole/head.weight    the same on all ranks, so the first saves it
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minidist.full import Parallel
from minidist.full.checkpoint import restore
from minidist.full.checkpoint.pieces import Extent, Piece
from minidist.full.placement import copies_of, placement_of
from minidist.full.replica import Remembered


def pieces(parallel: Parallel) -> Iterator[Piece]:
    """Yield what the strategy over the data axis keeps from step to step, as far as this rank saves
    it.
    """
    for name, each in _named(parallel):
        parameter = each.parameter
        if not placement_of(parameter).counts:
            continue
        rank = copies_of(parameter, parallel.mesh.data).rank
        if not each.alike:
            own = f"remembered/{each.word}/{rank}/{name}"
            yield Piece(own, extent_of(parameter), each.tensor.view_as(parameter))
        elif rank == 0:
            yield Piece(_shared_name(name, each), Extent.of(each.tensor.shape), each.tensor)


def load(path: Path, parallel: Parallel) -> None:
    """Fill what the strategy over the data axis keeps from step to step. Sends nothing.

    What each of more ranks had for itself is added up on the ranks that there are, so nothing of it
    is lost. What ranks had alike, but cut otherwise, begins anew.
    """
    site = site_of(parallel)
    there = restore.names(path, site)
    found = [(each, list(_stored(name, each, parallel, there))) for name, each in _named(parallel)]
    wanted = [piece for _, parts in found for piece in parts]
    restore.read(path, wanted, site)
    for each, parts in found:
        if parts:
            values = torch.stack([part.tensor for part in parts])
            each.tensor.copy_(values.sum(0))


def _stored(
    name: str, each: Remembered, parallel: Parallel, there: Mapping[str, Any]
) -> Iterator[Piece]:
    """Yield the pieces, with room for their values, whose sum this rank is to hold."""
    if each.alike:
        shared = _shared_name(name, each)
        shape = tuple(each.tensor.shape)
        if shared in there and there[shared][1] == shape:
            yield Piece(shared, Extent.of(each.tensor.shape), torch.empty_like(each.tensor))
        return
    copies = copies_of(each.parameter, parallel.mesh.data)
    for rank in itertools.count(copies.rank, copies.size):
        own = f"remembered/{each.word}/{rank}/{name}"
        if own not in there:
            return
        yield Piece(own, extent_of(each.parameter), torch.empty_like(each.tensor))


def _shared_name(name: str, each: Remembered) -> str:
    """Return the name of what ranks hold alike; a parameter that is cut has one for each block."""
    block = placement_of(each.parameter).block
    part = "whole"
    if block is not None:
        start, stop = block.bounds[block.comm.rank]
        part = f"{start}-{stop}"
    return f"remembered/{each.word}/{part}/{name}"


def _named(parallel: Parallel) -> Iterator[tuple[str, Remembered]]:
    """Yield what is remembered, each with the name of its parameter in the serial model."""
    names = {parameter: name for name, parameter in parallel.model.named_parameters()}
    for each in parallel.replica.remembered():
        yield names[each.parameter], each


def site_of(parallel: Parallel) -> str:
    """Return what the names of a site's pieces begin with: nothing for the first one's.

    Sites have trained apart, so each saves all of its own.
    """
    site = parallel.mesh.dcn.rank
    return f"site-{site}/" if site else ""


def sites_in(names: Iterable[str]) -> list[str]:
    """Return what `site_of` says of each site that has some of these names of pieces."""
    others = {name.partition("/")[0] + "/" for name in names if name.startswith("site-")}
    return ["", *sorted(others)]


def extent_of(parameter: Tensor) -> Extent:
    """Return which elements of the serial model's parameter these are."""
    placement = placement_of(parameter)
    block, mine = placement.block, placement.slice
    shaped = block or mine or parameter
    cut = (block.dim, *block.bounds[block.comm.rank]) if block and block.dim is not None else ()
    whole = Extent.of(shaped.shape, *cut)
    return replace(whole, start=mine.start, stop=mine.stop) if mine else whole

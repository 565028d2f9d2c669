"""Checkpoints of a running job: what this rank saves of it, and a writer that lets training go on
meanwhile.

    training   step │ copy │ step │ step │ step │ wait, copy │ step ...
    writer               └── write ─ meet ─ commit ──┘    └── write ...      a thread; rank 0 commits

Training waits only for the copy, and for a writer that is still busy when the next checkpoint is
due. One rank saves each element: the first of the replicas along the data axis, and of copies along
other axes the one that `counts`. Memory: one copy, on the CPU, of what this rank saves.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minidist.full import Parallel
from minidist.full.checkpoint import remembered, restore, store
from minidist.full.checkpoint.pieces import Extent, Piece
from minidist.full.checkpoint.remembered import extent_of, site_of
from minidist.full.checkpoint.store import CheckpointError
from minidist.full.comm import Communicator
from minidist.full.comm.agree import all_or_none
from minidist.full.comm.stream import ThreadStream
from minidist.full.placement import (
    copies_of,
    placement_of,
)
from minidist.full.precision.masters import MasterWeights

BESIDE = "beside/"  # names of what strategies keep beside an optimizer's state begin with it
MOMENT = 0.005  # seconds between two looks at a checkpoint that is being abandoned


class Writer:
    """Saves checkpoints of all ranks of `comm` to `folder`, in the background.

    Parameters
    ----------
    keep, every : int
        See `store.forget`.

    Attributes
    ----------
    saves : list of (float, float)
        For each checkpoint, the seconds that training waited, and those from then on until it was
        on the disk.
    """

    def __init__(
        self,
        folder: Path,
        comm: Communicator,
        keep: int,
        every: int,
    ) -> None:
        self.folder, self.keep, self.every = folder, keep, every
        # also where collectives have streams of the GPU: this is work of the CPU
        self.stream = ThreadStream(comm)
        self.job: Any = None
        self.copies: dict[str, Tensor] = {}
        self.saves: list[tuple[float, float]] = []

    def has(self, step: int) -> bool:
        """Tell whether rank 0 sees a checkpoint of this step. Collective."""
        path = store.final_of(self.folder, step)
        comm = self.stream.caller
        answers = comm.all_gather_object(path.exists())
        return bool(answers[0])

    def save(self, step: int, pieces: Iterable[Piece], state: dict[str, Any]) -> None:
        """Begin to write a checkpoint as soon as the one before is written. Collective.

        Raises
        ------
        CheckpointError
            On every rank, if the one before could not be written.
        """
        started = time.perf_counter()
        self.wait()
        copies = [piece._replace(tensor=self._copy(piece)) for piece in pieces]
        self.job = self.stream.launch(
            self._write, step, copies, state, time.perf_counter() - started
        )

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is on the disk. Raises as `save`, on every
        rank.
        """
        job, self.job = self.job, None
        if job is not None and (problem := job.wait()):
            raise CheckpointError(problem)

    def abandon(self) -> None:
        """Once a rank is lost: return when nothing of a checkpoint that was begun is written any
        more.

        Nobody waits for another rank here. What has come so far that rank 0 only has to rename it
        becomes a checkpoint.
        """
        job, self.job = self.job, None
        with suppress(ValueError):  # it has begun
            self.stream.jobs.remove(job)
            return
        while job is not None and not job.done:
            time.sleep(MOMENT)

    def _copy(self, piece: Piece) -> Tensor:
        """Copy a tensor to the CPU, into the memory of its last copy."""
        kept = self.copies.get(piece.name)
        if kept is None or kept.shape != piece.tensor.shape or kept.dtype != piece.tensor.dtype:
            kept = self.copies[piece.name] = torch.empty_like(piece.tensor, device="cpu")
        return kept.copy_(piece.tensor.detach())

    def _write(
        self,
        step: int,
        pieces: list[Piece],
        state: dict[str, Any],
        stalled: float,
    ) -> str:
        """Write together with the other ranks; return what went wrong, on every rank alike. Runs on
        the stream.
        """
        started, comm = time.perf_counter(), self.stream.comm
        first, unfinished = comm.rank == 0, self.folder / f"{store.UNFINISHED}-{step:08d}"

        def commit() -> None:
            store.commit(self.folder, step, shards, state)
            store.forget(self.folder, self.keep, self.every)

        try:
            all_or_none(comm, lambda: first and store.begin(self.folder, step), CheckpointError)
            shard = all_or_none(
                comm, lambda: store.write_shard(unfinished, comm.rank, pieces), CheckpointError
            )
            shards = comm.all_gather_object(shard)
            all_or_none(comm, lambda: commit() if first else None, CheckpointError)
        except CheckpointError as error:
            if first:
                store.abandon(unfinished)
            return str(error)
        finally:
            self.saves.append((stalled, time.perf_counter() - started))
        return ""


# ---------------------------------------------------------------- what there is to save


def pieces_to_save(parallel: Parallel, optimizer: MasterWeights) -> Iterator[Piece]:
    """Yield what this rank saves: parameters, beside each the tensors of its optimizer's state, and
    what the `state` of each strategy names, such as scales of fp8 and biases of routers.
    """
    site = site_of(parallel)
    for piece in _pieces_of_a_site(parallel, optimizer):
        yield piece._replace(name=site + piece.name)


def _pieces_of_a_site(parallel: Parallel, optimizer: MasterWeights) -> Iterator[Piece]:
    # what strategies name is equal on both axes
    if parallel.mesh.data.rank == parallel.mesh.tp.rank == 0:
        for name, tensor in parallel.state().items():
            yield Piece(name, Extent.of(tensor.shape), tensor)
    for name, extent, parameter in held(parallel):
        counts = placement_of(parameter).counts
        if not (counts and _first_replica(parallel, parameter)):
            continue
        yield Piece(name, extent, parameter)
        beside = {BESIDE + word: tensor for word, tensor in parallel.beside(parameter).items()}
        for moment, value in (optimizer.state_of(parameter) | beside).items():
            if isinstance(value, Tensor) and value.dim():
                yield Piece(f"{name}/{moment}", extent, value)
            elif extent.count and extent.start == extent.first == 0:
                # one number for the whole parameter, with its first element
                yield Piece(f"{name}/{moment}", Extent.of(()), torch.as_tensor(value))
    yield from remembered.pieces(parallel)


def load_pieces(path: Path, parallel: Parallel, optimizer: MasterWeights) -> None:
    """Fill what this rank updates, and its optimizer, from a checkpoint of any layout. Sends
    nothing.

    Call `parallel.stepped()` afterwards, on all ranks together: whole parameters then follow.

    Raises
    ------
    CheckpointError
        If it is damaged, or another model's. Nothing has been changed then.
    """
    site = site_of(parallel)
    there = restore.names(path, site)
    wanted = []
    values: dict[Tensor, Tensor] = {}
    states: dict[nn.Parameter, dict[str, Any]] = {}
    besides: list[tuple[Tensor, Tensor]] = []
    for name, extent, parameter in held(parallel):
        beside = parallel.beside(parameter)
        values[parameter] = torch.empty(parameter.shape, dtype=parameter.dtype)
        wanted.append(Piece(name, extent, values[parameter]))
        for full, (dtype, whole) in there.items():
            if full.startswith(f"{name}/"):
                part, shape = (extent, parameter.shape) if whole else (Extent.of(()), torch.Size())
                moment = torch.empty(shape, dtype=dtype)
                word = full.removeprefix(f"{name}/")
                if not word.startswith(BESIDE):
                    states.setdefault(parameter, {})[word] = moment
                elif word.removeprefix(BESIDE) in beside:
                    besides.append((beside[word.removeprefix(BESIDE)], moment))
                else:
                    continue  # of an option that this run has not
                wanted.append(Piece(full, part, moment))
    for name, tensor in parallel.state().items():
        if name in there:
            values[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype)
            wanted.append(Piece(name, Extent.of(tensor.shape), values[tensor]))
    for companion in parallel.companions:
        for word, number in companion.counts().items():
            full = next((name for name in there if name.endswith(f"/{BESIDE}{word}")), "")
            if full:  # whether or not this rank updates that parameter
                besides.append((number, torch.empty_like(number)))
                wanted.append(Piece(full, Extent.of(()), besides[-1][1]))
    restore.read(path, wanted, site)
    with torch.no_grad():
        for ours, value in values.items():
            ours.copy_(value)
        optimizer.restore(states)
        for companion in parallel.companions:
            companion.begin()  # what the checkpoint lacks
        for ours, value in besides:
            ours.copy_(value)
    remembered.load(path, parallel)


def held(parallel: Parallel) -> Iterator[tuple[str, Extent, nn.Parameter]]:
    """Yield, of every parameter that this rank updates, its name in the serial model, which
    elements, and these.
    """
    names = {parameter: name for name, parameter in parallel.model.named_parameters()}
    for parameter in parallel.kept:
        if parallel.recipe.lora and not parameter.requires_grad:
            continue  # it is in the folder that the run began from
        placement = placement_of(parameter)
        named = placement.tie or placement.slice
        name = named.name if named else names[parameter]
        yield name, extent_of(parameter), parameter


def _first_replica(parallel: Parallel, parameter: Tensor) -> bool:
    """Tell whether this rank is among the first, along the data axis, that together hold the
    parameter.
    """
    mine = placement_of(parameter).slice
    return copies_of(parameter, parallel.mesh.data).rank < (mine.comm.size if mine else 1)

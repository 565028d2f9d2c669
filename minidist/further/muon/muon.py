"""Muon over parts of matrices: one rank, its owner, gathers a matrix and makes its update orthogonal.

    rank 0   ▐ part of A, B, C     ── all-to-all ─▶   A whole ─▶ its change    ── all-to-all ─▶   slices change
    rank 1   ▐ part of A, B, C                        B, C whole

Muon changes a matrix by its momentum, made orthogonal. The momentum is one number for each element,
so each rank has that of its slice: n bytes over all ranks, beside the 2 n of AdamW's two moments.
Making it orthogonal needs the whole matrix and half a dozen products of matrices, which only one
rank computes. The change does not depend on the parameter, so the parameter stays where it is;
weight decay is one factor for all elements. (Jordan et al. 2024, Muon; Liu et al. 2025, Muon is
scalable for LLM training, section 2.3.)

Take a matrix of n bytes, of which its owner's slice has m. The other ranks send n - m bytes to the
owner, and it sends n - m back: at most 2 n over all ranks, and 2 (P - 1)/P n if slices are equal.
Each matrix, the largest first, goes to the rank that owns least so far. `muon_elements` is this as
a formula, for each rank.

    ZeRO 0          every rank has the whole gradient, and computes every change: nothing is sent
    ZeRO 1 to 3     2 (n - m), beside what AdamW sends
    tp              a rank has a block: the T ranks that own those of a matrix gather it, (T - 1) n
                    bytes over all; each computes the whole change, and takes its block of it
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from minidist.full.collectives import all_to_all
from minidist.full.comm import Communicator
from minidist.full.placement import Block, placement_of


class Part(NamedTuple):
    """What a step of Muon takes of one matrix: a slice of it, a block, or all.

    Attributes
    ----------
    piece : nn.Parameter
        One of those that `Matrices` was built with, whose record says which part it is.
    values : Tensor
        What changes: the piece itself, or its master.
    gradient : Tensor
        Of this part.
    state : dict
        Where its momentum is kept.
    options : dict
        Those of `torch.optim.Muon`.
    """

    piece: nn.Parameter
    values: Tensor
    gradient: Tensor
    state: dict[str, Any]
    options: dict[str, Any]


class Matrices:
    """Matrices that ranks hold in parts, and who owns which.

    Building it is collective if they are slices.

    Parameters
    ----------
    pieces
        This rank's parts of the same matrices on every rank.

    Attributes
    ----------
    sent : int
        The bytes that this rank has sent so far to make updates orthogonal, as the communicators
        count them.

    Raises
    ------
    ValueError
        If a parameter is no matrix.
    """

    def __init__(self, pieces: Sequence[nn.Parameter]) -> None:
        self.numbers = {piece: number for number, piece in enumerate(pieces)}
        self.shapes = [_shape(piece) for piece in pieces]
        self.blocks = [_block(piece) for piece in pieces]
        self.comm: Communicator | None = None  # None: they are not slices
        for piece in pieces:
            if (mine := placement_of(piece).slice) is not None:
                self.comm = mine.comm
        self.sent = 0
        own = [piece.numel() for piece in pieces]
        self.rank, self.lengths = 0, [own]  # of each rank's parts
        if self.comm is not None:
            self.rank = self.comm.rank
            self.lengths = self.comm.all_gather_object(own)
        # of whole matrices, so that all ranks that share a matrix by blocks find the same owner
        sizes = []
        for shape, block in zip(self.shapes, self.blocks, strict=True):
            whole = shape if block is None else block.shape
            sizes.append(whole.numel())
        self.owners = balance(sizes, len(self.lengths))

    def update(self, parts: Sequence[Part]) -> None:
        """Update some of the matrices, the same on every rank. Collective."""
        before = self._counted()
        for dtype in dict.fromkeys(part.gradient.dtype for part in parts):
            alike = [part for part in parts if part.gradient.dtype == dtype]
            alike.sort(key=lambda part: self.owners[self.numbers[part.piece]])
            for part, change in zip(alike, self._changes(alike), strict=True):
                decay = float(part.options["lr"]) * part.options["weight_decay"]
                part.values.mul_(1 - decay).add_(change.view_as(part.values))
        self.sent += self._counted() - before

    def elements(self) -> float:
        """Return how many elements this rank sends in an update of all matrices, by formula."""
        cut = []
        for block in self.blocks:
            cut.append((1, 0) if block is None else (block.comm.size, block.shape.numel()))
        return muon_elements(self.rank, self.lengths, self.owners, cut)

    def _changes(self, parts: Sequence[Part]) -> Sequence[Tensor]:
        """Return the changes of this rank's parts of matrices, which are sorted by owner."""
        numbers = [self.numbers[part.piece] for part in parts]
        updates = [with_momentum(part).flatten() for part in parts]
        options = {}
        for number, part in zip(numbers, parts, strict=True):
            options[number] = part.options
        comm = self.comm
        if comm is None:
            changes = []
            for number, update in zip(numbers, updates, strict=True):
                changes.append(self._change(number, update, options[number]))
            return changes
        mine = [number for number in numbers if self.owners[number] == comm.rank]
        own = self.lengths[comm.rank]
        leaving = [0] * comm.size
        for number in numbers:
            leaving[self.owners[number]] += own[number]
        arriving = []
        for lengths in self.lengths:
            arriving.append(sum(lengths[number] for number in mine))
        # now each slice goes to the owner of its matrix
        slices = torch.cat(updates)
        received: Any = all_to_all(slices, comm, send_counts=leaving, receive_counts=arriving)
        # by rank, and of each rank by matrix; therefore every len(mine)-th is of the same matrix
        of_each = []
        for lengths in self.lengths:
            of_each += [lengths[number] for number in mine]
        pieces = torch.split(received, of_each)
        by_matrix = []
        for at, number in enumerate(mine):
            whole = torch.cat(pieces[at :: len(mine)])
            change = self._change(number, whole, options[number])
            column = [lengths[number] for lengths in self.lengths]
            by_matrix.append(torch.split(change, column))
        # now the changes go back, by rank again
        by_rank = [slices[:0]]
        for rank in range(comm.size):
            by_rank += [change[rank] for change in by_matrix]
        back: Any = all_to_all(
            torch.cat(by_rank),
            comm,
            send_counts=arriving,
            receive_counts=leaving,
        )
        return torch.split(back, [own[number] for number in numbers])

    def _change(self, number: int, update: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the change of a matrix, or of this rank's block of it, flat.

        It is what torch's Muon makes of zeros, if it has no momentum of its own.
        """
        block, matrix = self.blocks[number], update.view(self.shapes[number])
        if block is not None:
            matrix = block.full(matrix)
        twin = nn.Parameter(torch.zeros_like(matrix))
        twin.grad = matrix
        without_momentum = {**options, "momentum": 0.0, "nesterov": False}
        muon = torch.optim.Muon([twin], **without_momentum)
        muon.step()  # type: ignore[no-untyped-call]
        change = twin.detach()
        if block is not None:
            change = block.take(change)
        return change.flatten()

    def _counted(self) -> int:
        """Return all that this rank has sent along the axes that its matrices are shared on."""
        comms = {self.comm}
        for block in self.blocks:
            comms.add(None if block is None else block.comm)
        counted = 0
        for comm in comms - {None}:
            assert comm is not None
            counted += comm.traffic.bytes
            counted += comm.traffic.engine_bytes
        return counted


class SlicedMuon(torch.optim.Optimizer):
    """`torch.optim.Muon` over slices of matrices.

    Building it, `step`, and saving its state are collective.

    Parameters
    ----------
    params
        Groups of slices of the same matrices on every rank.
    **options
        The options of `torch.optim.Muon`.

    Raises
    ------
    ValueError
        If a parameter is no matrix.
    """

    elementwise = True  # slices are enough: it puts them together

    def __init__(self, params: ParamsT, *args: Any, **options: Any) -> None:
        some = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], *args, **options)
        super().__init__(params, some.defaults)
        self.matrices = self._all_matrices()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add slices of further matrices, and share all out anew. Collective."""
        super().add_param_group(param_group)
        if "matrices" in vars(self):
            sent = self.matrices.sent
            self.matrices = self._all_matrices()
            self.matrices.sent = sent

    def _all_matrices(self) -> Matrices:
        """Return those of all groups. Collective."""
        return Matrices([piece for group in self.param_groups for piece in group["params"]])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each matrix that has a gradient.

        Return the result of `closure`, called first. Collective.
        """
        with torch.enable_grad():
            loss = closure() if closure else None
        parts = []
        for group in self.param_groups:
            options = options_of(group)
            for piece in group["params"]:
                if piece.grad is not None:
                    state = self.state[piece]
                    parts.append(Part(piece, piece, piece.grad, state, options))
        self.matrices.update(parts)
        return loss


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of Muon that a parameter group has."""
    known = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))]).defaults
    return {name: value for name, value in group.items() if name in known}


def with_momentum(part: Part) -> Tensor:
    """Update the momentum of a part; return what is to become orthogonal."""
    gradient = part.gradient.as_subclass(Tensor)
    momentum = part.state.setdefault("momentum_buffer", torch.zeros_like(gradient))
    factor = part.options["momentum"]
    momentum.lerp_(gradient, 1 - factor)
    return gradient.lerp(momentum, factor) if part.options["nesterov"] else momentum


def muon_elements(
    rank: int,
    lengths: Sequence[Sequence[int]],
    owners: Sequence[int],
    cut: Sequence[tuple[int, int]] = (),
) -> float:
    """Return how many elements a rank sends in a step, to make updates of matrices orthogonal.

    Parameters
    ----------
    lengths
        By rank along the data axis, and by matrix: the elements of its slice.
    owners
        The owner of each matrix.
    cut
        Of each matrix the ranks that hold blocks of it, and its elements in all. What one of them
        sends of these is exact if blocks are equal; the sum over ranks always is.
    """
    sent = 0.0
    for number, owner in enumerate(owners):
        column = [each[number] for each in lengths]
        if owner != rank:
            sent += column[rank]  # its slice, to the owner
            continue
        sent += sum(column) - column[rank]  # the change, to all others
        if cut:
            ranks, whole = cut[number]
            sent += (ranks - 1) / ranks * whole
    return sent


def balance(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the owner of each size: the largest first, always to the rank that has least so
    far.
    """
    given, owners = [0] * ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owners[number] = given.index(min(given))
        given[owners[number]] += sizes[number]
    return owners


def _shape(piece: nn.Parameter) -> torch.Size:
    """Return the shape of the matrix, or the block, that a piece is part of. Raises as
    `Matrices`.
    """
    mine = placement_of(piece).slice
    shape = piece.shape if mine is None else mine.shape
    if len(shape) != 2:
        name = "a parameter" if mine is None else mine.name
        raise ValueError(f"Muon is for matrices, and {name} has the shape {list(shape)}: use AdamW")
    return shape


def _block(piece: nn.Parameter) -> Block | None:
    """Return which block of its matrix a piece belongs to; None if that is all of it."""
    block = placement_of(piece).block
    return None if block is None or block.dim is None else block

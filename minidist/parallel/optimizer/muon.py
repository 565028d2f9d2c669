"""Muon over slices: one rank, its owner, gathers the gradient of a matrix and computes the whole
update.

    rank 0   ▐ part of A, B, C     ── all-to-all ─▶   A whole ─▶ its change    ── all-to-all ─▶   slices change
    rank 1   ▐ part of A, B, C                        B, C whole

Muon changes a matrix by its momentum, made orthogonal. That needs the whole momentum and half a
dozen products of matrices, which only one rank computes. The change does not depend on the
parameter, so the parameter stays where it is; weight decay is one factor for all elements. (Jordan
et al. 2024, Muon; Liu et al. 2025, Muon is scalable for LLM training, section 2.3.)

Take a matrix of n bytes, of which its owner's slice has m. The other ranks send n - m bytes to the
owner, and it sends n - m back: at most 2 n over all ranks, and 2 (P - 1)/P n if slices are equal.
Only the owner has state: the momentum, n bytes. Each matrix, the largest first, goes to the rank
that owns least so far.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from minidist.collectives import all_to_all, broadcast
from minidist.parallel.optimizer.state import check_state
from minidist.parallel.placement import Slice, placement_of


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
        If a parameter is no matrix, or tensor parallelism has cut it.
    """

    elementwise = True  # slices are enough: it puts them together

    def __init__(self, params: ParamsT, *args: Any, **options: Any) -> None:
        some = torch.optim.Muon(
            [nn.Parameter(torch.zeros(1, 1))],
            *args,
            **options,
        )
        super().__init__(params, some.defaults)
        self.pieces: list[nn.Parameter] = []
        for group in self.param_groups:
            self.pieces += group["params"]
        self.placements = [_matrix(piece) for piece in self.pieces]
        self.owners: list[int] = []
        if self.pieces:
            self.comm = self.placements[0].comm
            # of each rank's slices
            self.lengths = self.comm.roll_call([len(piece) for piece in self.pieces])
            sizes = [placement.shape.numel() for placement in self.placements]
            self.owners = balance(sizes, self.comm.size)
        self.register_state_dict_post_hook(_whole)  # type: ignore[arg-type]
        self.register_load_state_dict_pre_hook(_owned)  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each matrix that has a gradient.

        Return the result of `closure`, called first. Collective.
        """
        with torch.enable_grad():
            loss = closure() if closure else None
        groups = [group for group in self.param_groups for _ in group["params"]]
        present = [number for number, piece in enumerate(self.pieces) if piece.grad is not None]
        present.sort(key=self.owners.__getitem__)
        for dtype in dict.fromkeys(self.pieces[number].dtype for number in present):
            alike = [number for number in present if self.pieces[number].dtype == dtype]
            changes = self._changes(alike, groups)
            for number, change in zip(alike, changes, strict=True):
                group = groups[number]
                decay = float(group["lr"]) * group["weight_decay"]
                self.pieces[number].mul_(1 - decay).add_(change)
        return loss

    def _changes(self, numbers: list[int], groups: list[dict[str, Any]]) -> Sequence[Tensor]:
        """Return the changes of this rank's slices of matrices, which are sorted by owner: two
        all-to-alls.
        """
        comm, lengths = self.comm, self.lengths
        mine = [number for number in numbers if self.owners[number] == comm.rank]
        own = lengths[comm.rank]
        leaving, arriving = [0] * comm.size, [0] * comm.size
        for number in numbers:
            leaving[self.owners[number]] += own[number]
        for rank in range(comm.size):
            arriving[rank] = sum(lengths[rank][number] for number in mine)
        # now each slice goes to the owner of its matrix
        slices = [self.pieces[number].grad for number in numbers]
        gradients = torch.cat([gradient for gradient in slices if gradient is not None])
        received: Any = all_to_all(
            gradients,
            comm,
            send_counts=leaving,
            receive_counts=arriving,
        )
        # by rank, and of each rank by matrix; therefore every len(mine)-th is of the same matrix
        of_each = [lengths[rank][number] for rank in range(comm.size) for number in mine]
        parts = torch.split(received, of_each)
        changes = []
        for at, number in enumerate(mine):
            whole = torch.cat(parts[at :: len(mine)])
            changes.append(self._change(number, whole, groups[number]))
        # now the changes go back, by rank again
        by_rank = [change[rank] for rank in range(comm.size) for change in changes]
        back = torch.cat([gradients[:0], *by_rank])
        change: Any = all_to_all(
            back,
            comm,
            send_counts=arriving,
            receive_counts=leaving,
        )
        return torch.split(change, [own[number] for number in numbers])

    def _change(
        self,
        number: int,
        gradient: Tensor,
        group: dict[str, Any],
    ) -> Sequence[Tensor]:
        """Return the change of each rank's slice of a whole matrix: what torch's Muon makes of
        zeros.
        """
        shape = self.placements[number].shape
        twin = nn.Parameter(torch.zeros_like(gradient).view(shape))
        twin.grad = gradient.view(shape)
        options = {name: value for name, value in group.items() if name != "param_names"}
        muon = torch.optim.Muon([options | {"params": [twin]}])
        muon.state[twin] = self.state[self.pieces[number]]
        muon.step()  # type: ignore[no-untyped-call]
        return torch.split(
            twin.detach().flatten(),
            [lengths[number] for lengths in self.lengths],
        )


def balance(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the owner of each size: the largest first, always to the rank that has least so
    far.
    """
    given, owners = [0] * ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owners[number] = given.index(min(given))
        given[owners[number]] += sizes[number]
    return owners


def _matrix(piece: nn.Parameter) -> Slice:
    """Return which elements of its matrix a slice has. Raises as `SlicedMuon`."""
    mine, block = placement_of(piece).slice, placement_of(piece).block
    assert mine is not None
    if len(mine.shape) != 2:
        raise ValueError(
            f"Muon is for matrices, and {mine.name} has the shape {list(mine.shape)}: use AdamW"
        )
    if block is not None and block.dim is not None:
        raise ValueError(
            f"Muon needs the whole of {mine.name}, which tensor parallelism cuts: use tp=1, "
            "or AdamW"
        )
    return mine


def _whole(muon: SlicedMuon, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an unsharded Muon: each owner broadcasts its momenta. Collective."""
    everyones = muon.comm.roll_call(list(saved["state"])) if muon.pieces else []
    state = {}
    for number in sorted(set().union(*everyones)):
        momentum = saved["state"].get(number, {}).get("momentum_buffer")
        if momentum is None:
            momentum = muon.pieces[number].new_empty(muon.placements[number].shape)
        broadcast(momentum, muon.comm, root=muon.owners[number])
        state[number] = {"momentum_buffer": momentum}
    return saved | {"state": state}


def _owned(muon: SlicedMuon, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an unsharded Muon's state that this rank owns."""
    check_state(saved, muon.placements, ())
    mine = {
        number: held
        for number, held in saved["state"].items()
        if muon.owners[number] == muon.comm.rank
    }
    return saved | {"state": deepcopy(mine)}

"""PowerSGD: two thin matrices travel in place of a large one, and what they miss is sent later.

    M = G + E             n x m    this rank's gradient, and what it has kept back so far
    P = M Q               n x r    summed over ranks; then its columns are made orthonormal
    Q = transposed M P    m x r    summed over ranks; the next step begins with it (warm start)
    E = M - P own Q       n x m    kept back: M less what this rank has contributed
    G = P Q               n x m    the same on every rank

One step of the power iteration turns P towards the r directions in which the summed gradients are
largest; with the Q of the step before it goes on where that ended. What is kept back is added to
the next gradient (error feedback), so all that was ever sent is the sum of all gradients, less what
is kept back now.

Vectors (biases, norms), and matrices that r columns would not make smaller, are summed as they are;
they travel with the Ps.

Cost: two all-reduces for each flat tensor, of r n + what is plain and of r m elements, where their
gradients have n m. (Vogels, Karimireddy and Jaggi 2019, algorithms 1 and 2.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minidist.collectives import all_reduce
from minidist.comm import Communicator
from minidist.parallel.replica import Remembered

HALVES = (torch.float16, torch.bfloat16)


@dataclass
class Matrix:
    """A gradient that travels as two factors.

    Attributes
    ----------
    parameter : nn.Parameter
    place : slice
        Where the flat tensor has it.
    kept : Tensor
        E, [n, m]: what this rank has not sent yet.
    left, right : Tensor
        P, [n, r], and Q, [m, r]: views into what is sent.
    """

    parameter: nn.Parameter
    place: slice
    kept: Tensor
    left: Tensor
    right: Tensor

    def gradient_in(self, flat: Tensor) -> Tensor:
        """Return the gradient as a matrix, a view."""
        return flat[self.place].view_as(self.kept)


class PowerSGD:
    """What one flat tensor of gradients travels as. Building it is collective.

    Parameters
    ----------
    parameters : list of nn.Parameter
        Whose gradients the flat tensor holds, in order.
    comm : Communicator
        Its ranks, for memory that they can register.
    rank : int
        Columns of the factors.
    seed : int
        Of the first Q, which is the same on all ranks.

    Memory: what is kept back, which has the bytes of the matrices (twice, if these have 16 bits),
    and the factors.
    """

    def __init__(
        self, parameters: list[nn.Parameter], comm: Communicator, rank: int, seed: int = 0
    ) -> None:
        like = parameters[0]
        # columns cannot be made orthogonal in 16 bits
        dtype = torch.float32 if like.dtype in HALVES else like.dtype
        sides = {p: found for p in parameters if (found := thin(p, rank)) is not None}
        plain = [parameter for parameter in parameters if parameter not in sides]
        lefts = [n * r for n, _, r in sides.values()]
        rights = [m * r for _, m, r in sides.values()]
        sizes = lefts + [parameter.numel() for parameter in plain]
        first: Any = comm.allocate(sum(sizes), dtype)
        second: Any = comm.allocate(sum(rights), dtype)
        self.first: Tensor = first.to(like.device)
        self.second: Tensor = second.to(like.device)

        places = places_in_flat(parameters)
        views = iter(self.first.split(sizes))
        generator = torch.Generator().manual_seed(seed)
        self.matrices: list[Matrix] = []
        for parameter, right in zip(sides, self.second.split(rights), strict=True):
            n, m, r = sides[parameter]
            right.copy_(torch.randn(m * r, generator=generator, dtype=torch.float64))
            matrix = Matrix(
                parameter,
                places[parameter],
                kept=torch.zeros(n, m, dtype=dtype, device=like.device),
                left=next(views).view(n, r),
                right=right.view(m, r),
            )
            self.matrices.append(matrix)
        # where the flat tensor has a gradient that is sent as it is, and as what it is sent
        self.plain = [(places[parameter], next(views)) for parameter in plain]

    def reduce(self, flat: Tensor, comm: Communicator) -> None:
        """Replace this rank's gradients by what all ranks have sent of theirs. Collective.

        If a sum overflows, all gradients become NaN, and nothing that is kept changes: a loss
        scaler then leaves the step out.
        """
        for place, view in self.plain:
            view.copy_(flat[place])
        wholes = []
        for matrix in self.matrices:
            whole = matrix.gradient_in(flat) + matrix.kept
            torch.mm(whole, matrix.right, out=matrix.left)
            wholes.append(whole)
        all_reduce(self.first, comm)
        if flat.dtype in HALVES and not self.first.isfinite().all():
            flat.fill_(torch.nan)
            return

        for place, view in self.plain:
            flat[place] = view
        if not self.matrices:
            return
        for matrix, whole in zip(self.matrices, wholes, strict=True):
            orthonormal, _ = torch.linalg.qr(matrix.left)
            matrix.left.copy_(orthonormal)
            torch.mm(whole.T, matrix.left, out=matrix.right)
            torch.addmm(whole, matrix.left, matrix.right.T, alpha=-1, out=matrix.kept)
        all_reduce(self.second, comm)
        for matrix in self.matrices:
            matrix.gradient_in(flat).copy_(matrix.left @ matrix.right.T)

    def sent(self, ranks: int) -> float:
        """Return the bytes that a rank sends for it."""
        return 2 * (ranks - 1) / ranks * (self.first.nbytes + self.second.nbytes)

    def remembered(self) -> Iterator[Remembered]:
        """Yield what is kept back, and the factor that the next step begins with."""
        for matrix in self.matrices:
            yield Remembered("kept back", matrix.parameter, matrix.kept, alike=False)
            yield Remembered("factor", matrix.parameter, matrix.right, alike=True)


def places_in_flat(parameters: list[nn.Parameter]) -> dict[nn.Parameter, slice]:
    """Return where a flat tensor has each parameter's gradient."""
    places = {}
    start = 0
    for parameter in parameters:
        places[parameter] = slice(start, start + parameter.numel())
        start += parameter.numel()
    return places


def thin(parameter: Tensor, rank: int) -> tuple[int, int, int] | None:
    """Return the sides n and m of a parameter as a matrix, and the columns r of its factors; None if
    these would not be smaller.
    """
    if parameter.dim() < 2:
        return None
    n = parameter.shape[0]
    m = parameter.numel() // n
    r = min(rank, n, m)
    return (n, m, r) if r * (n + m) < n * m else None

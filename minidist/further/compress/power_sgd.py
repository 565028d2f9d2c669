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

Cost: two all-reduces for each bucket, of r n + what is plain and of r m elements, where their
gradients have n m. (Vogels, Karimireddy and Jaggi 2019, algorithms 1 and 2.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator
from minidist.full.ddp.compress.flat import HALVES, overflowed, wide
from minidist.full.replica import Remembered


@dataclass
class Matrix:
    """A gradient that travels as two factors.

    Attributes
    ----------
    place : int
        Which of the gradients it is.
    kept : Tensor
        E, [n, m]: what this rank has not sent yet.
    left, right : Tensor
        P, [n, r], and Q, [m, r]: views into what is sent.
    """

    place: int
    kept: Tensor
    left: Tensor
    right: Tensor


class PowerSGD:
    """What the gradients of a bucket travel as. Building it is collective.

    Parameters
    ----------
    parameters : list of nn.Parameter
        Whose gradients they are.
    comm : Communicator
        The ranks, for memory that they can register.
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
        self.parameters = parameters
        like = parameters[0]
        # columns cannot be made orthogonal in 16 bits, and a sum of them may overflow
        self.widened = like.dtype in HALVES
        dtype = wide(parameters)
        sides = {}
        plain = []
        for place, parameter in enumerate(parameters):
            factored = thin(parameter, rank)
            if factored is None:
                plain.append(place)
            else:
                sides[place] = factored
        lefts = [n * r for n, _, r in sides.values()]
        rights = [m * r for _, m, r in sides.values()]
        sizes = lefts + [parameters[place].numel() for place in plain]
        first: Any = comm.allocate(sum(sizes), dtype)
        second: Any = comm.allocate(sum(rights), dtype)
        self.first: Tensor = first.to(like.device)
        self.second: Tensor = second.to(like.device)

        views = iter(self.first.split(sizes))
        generator = torch.Generator().manual_seed(seed)
        self.matrices: list[Matrix] = []
        for place, right in zip(sides, self.second.split(rights), strict=True):
            n, m, r = sides[place]
            drawn = torch.randn(m * r, generator=generator, dtype=torch.float64)
            right.copy_(drawn)
            kept = torch.zeros(n, m, dtype=dtype, device=like.device)
            matrix = Matrix(place, kept, left=next(views).view(n, r), right=right.view(m, r))
            self.matrices.append(matrix)
        # which gradient is sent as it is, and what it is sent in
        self.plain = [(place, next(views)) for place in plain]

    def reduce(self, gradients: list[Tensor], comm: Communicator) -> None:
        """Replace this rank's gradients, which are contiguous, by what all ranks have sent of
        theirs. Collective.

        If a sum of 16-bit gradients overflows, all become NaN, and nothing that is kept changes: a
        loss scaler then leaves the step out.
        """
        for place, view in self.plain:
            view.copy_(gradients[place].view(-1))
        wholes = [self._whole(matrix, gradients) for matrix in self.matrices]
        for matrix, whole in zip(self.matrices, wholes, strict=True):
            torch.mm(whole, matrix.right, out=matrix.left)
        all_reduce(self.first, comm)
        if overflowed(self.first, gradients):
            return

        for place, view in self.plain:
            gradient = gradients[place]
            gradient.copy_(view.view_as(gradient))
        if not self.matrices:
            return
        for matrix, whole in zip(self.matrices, wholes, strict=True):
            orthonormal, _ = torch.linalg.qr(matrix.left)
            matrix.left.copy_(orthonormal)
            torch.mm(whole.T, matrix.left, out=matrix.right)
            own = matrix.right.T
            torch.addmm(whole, matrix.left, own, alpha=-1, out=matrix.kept)
        all_reduce(self.second, comm)
        for matrix in self.matrices:
            self._give(matrix, gradients)

    def _whole(self, matrix: Matrix, gradients: list[Tensor]) -> Tensor:
        """Return a gradient and what is kept of it. Where an overflow can still call it off, what
        is kept stays as it is.
        """
        gradient = gradients[matrix.place].view_as(matrix.kept)
        if self.widened:
            return gradient + matrix.kept
        return matrix.kept.add_(gradient)

    def _give(self, matrix: Matrix, gradients: list[Tensor]) -> None:
        """Put the product of the factors in the gradient's place."""
        gradient = gradients[matrix.place].view_as(matrix.kept)
        total = matrix.right.T
        if self.widened:
            gradient.copy_(matrix.left @ total)
        else:
            torch.mm(matrix.left, total, out=gradient)

    def sent(self, ranks: int) -> float:
        """Return the bytes that a rank sends for it."""
        return 2 * (ranks - 1) / ranks * (self.first.nbytes + self.second.nbytes)

    def remembered(self) -> Iterator[Remembered]:
        """Yield what is kept back, and the factor that the next step begins with."""
        for matrix in self.matrices:
            parameter = self.parameters[matrix.place]
            yield Remembered("kept back", parameter, matrix.kept, alike=False)
            yield Remembered("factor", parameter, matrix.right, alike=True)


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

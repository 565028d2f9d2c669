# task 2: cuts equal slices without padding, so what remains of a size that does not divide is never updated.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_gather, reduce_scatter


class ZeRO1:
    def __init__(self, model, comm, lr):
        self.comm, self.parameters = comm, list(model.parameters())
        self.even = [parameter.numel() // comm.size * comm.size for parameter in self.parameters]
        self.slices = [
            torch.nn.Parameter(whole.tensor_split(comm.size)[comm.rank].clone())
            for whole in self.wholes()
        ]
        self.adamw = torch.optim.AdamW(self.slices, lr=lr)

    def wholes(self):
        return [
            p.detach().view(-1)[:even] for p, even in zip(self.parameters, self.even, strict=True)
        ]

    def zero_grad(self):
        for parameter in [*self.parameters, *self.slices]:
            parameter.grad = None

    def reduce(self):
        for parameter, even, piece in zip(self.parameters, self.even, self.slices, strict=True):
            piece.grad = reduce_scatter(parameter.grad.flatten()[:even], self.comm)

    def step(self):
        self.adamw.step()
        for whole, piece in zip(self.wholes(), self.slices, strict=True):
            all_gather(piece.detach(), self.comm, out=whole)

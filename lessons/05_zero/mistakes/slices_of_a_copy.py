# task 2: cuts slices out of a copy of each parameter: as views they keep the whole copy, n bytes more.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_gather, reduce_scatter


class ZeRO1:
    def __init__(self, model, comm, lr):
        self.comm, self.parameters, self.kept = comm, list(model.parameters()), []
        wholes = [parameter.detach().view(-1).clone() for parameter in self.parameters]
        self.slices = [
            torch.nn.Parameter(whole.tensor_split(comm.size)[comm.rank]) for whole in wholes
        ]
        self.adamw = torch.optim.AdamW(self.slices, lr=lr)

    def zero_grad(self):
        self.kept.clear()
        for parameter in [*self.parameters, *self.slices]:
            parameter.grad = None

    def reduce(self):
        for parameter, piece in zip(self.parameters, self.slices, strict=True):
            piece.grad = reduce_scatter(parameter.grad.view(-1), self.comm)

    def step(self):
        self.adamw.step()
        for parameter, piece in zip(self.parameters, self.slices, strict=True):
            all_gather(piece.detach().clone(), self.comm, out=parameter.detach().view(-1))

# task 2: a slice's gradient is a view into a copy of the whole gradient, which it keeps alive.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_gather, reduce_scatter


class ZeRO1:
    def __init__(self, model, comm, lr):
        self.comm, self.parameters, self.kept = comm, list(model.parameters()), []
        wholes = [parameter.detach().view(-1) for parameter in self.parameters]
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
            whole = parameter.grad.flatten().clone()
            mine = whole.tensor_split(self.comm.size)[self.comm.rank]
            mine.copy_(reduce_scatter(parameter.grad.flatten(), self.comm))
            piece.grad = mine

    def step(self):
        self.adamw.step()
        for parameter, piece in zip(self.parameters, self.slices, strict=True):
            all_gather(piece.detach().clone(), self.comm, out=parameter.detach().view(-1))

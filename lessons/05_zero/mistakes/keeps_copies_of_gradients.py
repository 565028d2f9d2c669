# task 3: frees every gradient, and keeps a copy of it in a list.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_gather, reduce_scatter


class ZeRO2:
    def __init__(self, model, comm, lr):
        self.comm, self.parameters, self.kept = comm, list(model.parameters()), []
        wholes = [parameter.detach().view(-1) for parameter in self.parameters]
        self.slices = [
            torch.nn.Parameter(whole.tensor_split(comm.size)[comm.rank]) for whole in wholes
        ]
        self.adamw = torch.optim.AdamW(self.slices, lr=lr)
        self.piece = dict(zip(self.parameters, self.slices, strict=True))
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, parameter):
        piece, whole = self.piece[parameter], parameter.grad.flatten().clone()
        parameter.grad = None
        self.kept.append(whole)
        gradient = reduce_scatter(whole, self.comm)
        piece.grad = gradient if piece.grad is None else piece.grad + gradient

    def zero_grad(self):
        self.kept.clear()
        for parameter in [*self.parameters, *self.slices]:
            parameter.grad = None

    def reduce(self):
        pass

    def step(self):
        self.adamw.step()
        for parameter, piece in zip(self.parameters, self.slices, strict=True):
            all_gather(piece.detach().clone(), self.comm, out=parameter.detach().view(-1))

# task 2: sends zeros for the frozen parameters: the bytes of full training.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def reduce_adapters(model, comm):
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    flat = torch.cat([part.flatten() for part in parts])
    all_reduce(flat, comm, algorithm="ring")
    for parameter, total in zip(
        model.parameters(), flat.split([part.numel() for part in parts]), strict=True
    ):
        if parameter.grad is not None:
            parameter.grad = total.view_as(parameter)

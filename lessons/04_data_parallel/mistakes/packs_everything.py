# task 2: packs all gradients into one tensor and reduces that, instead of one all-reduce for each parameter.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def sum_gradients(model, comm):
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    all_reduce(flat, comm, algorithm="ring")
    for gradient, total in zip(
        gradients, flat.split([one.numel() for one in gradients]), strict=True
    ):
        gradient.copy_(total.view_as(gradient))

"""ZeRO-3 for any module, which torch calls fully sharded: parameters are whole only while in use.

    forward     pre-hook: unshard │ layer computes │ hook: reshard
    backward    pre-hook: unshard │ layer computes │ its last gradient arrives: reshard, reduce-scatter

Unshard is an all-gather. For each microbatch, a block of n bytes sends (P - 1)/P of 3 n from a rank;
what is outside of blocks sends 2 n, as it stays whole from forward to `finish`. A rank holds 1/P of
the parameters, and one layer. `PlainZeRO` in `zero.py` does the same in two loops: read it first.
(Rajbhandari et al. 2020, section 5; Zhao et al. 2023, "PyTorch FSDP", section 3.)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from minidist.comm import Communicator
from minidist.zero import Unit, ZeRO


class FSDP(ZeRO):
    """A module under ZeRO-3, `PlainZeRO` by hooks; to run, `minidist.full.FSDP`.

    model = FSDP(model, comm, blocks=model.layers)
    optimizer = torch.optim.AdamW(model.trained)
    loss_of(model(tokens)).backward()
    model.finish()
    optimizer.step()

    Each of the `blocks` must be called as a module, since hooks see no other way in, and by all
    ranks alike: a rank that leaves one out would not gather it for the others.
    """

    def __init__(self, module: nn.Module, comm: Communicator, blocks: Iterable[nn.Module]) -> None:
        super().__init__(module, comm, 3, blocks)
        for layer, unit in zip(self.layers, self.units, strict=True):
            unit.reshard()
            hook_layer(layer, unit, outermost=layer is module)

    def launch(self, number: int) -> None:
        """Reduce the gradients of a unit, and free a block's parameters."""
        if self.layers[number] is not self.module:
            self.units[number].reshard()
        super().launch(number)

    def finish(self) -> None:
        """Reduce what backward has not completed, and free all parameters. Collective."""
        super().finish()
        for unit in self.units:
            unit.reshard()

    def publish(self) -> None:
        """Do nothing: the next forward gathers the updated parameters."""


def hook_layer(layer: nn.Module, unit: Unit, outermost: bool) -> None:
    """Have a unit whole in the forward of its layer, and from the layer's backward until `launch`.

    The unit of the outermost module stays whole from its forward until `finish`.
    """

    def after_forward(*_: object) -> None:
        if not (outermost and torch.is_grad_enabled()):
            unit.reshard()

    layer.register_forward_pre_hook(lambda *_: unit.unshard())
    layer.register_forward_hook(after_forward)
    if not outermost:
        layer.register_full_backward_pre_hook(lambda *_: unit.unshard())

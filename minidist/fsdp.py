"""ZeRO-3 for any module, which torch calls fully sharded: parameters are whole only while in use.

    forward     pre-hook: unshard │ layer computes │ hook: reshard
    backward    pre-hook: unshard │ layer computes │ its last gradient arrives: reshard, reduce-scatter

Unshard is an all-gather, so a rank sends (P - 1)/P of 3 n bytes in a step, half as much again as
plain data parallelism. Of n bytes of parameters it holds n/P, and one layer. `PlainZeRO` in
`zero.py` does the same in two loops: read it first. (Rajbhandari et al. 2020, section 5; Zhao et
al. 2023, "PyTorch FSDP", section 3.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from minidist.comm import Communicator
from minidist.zero import Unit, ZeRO


class FSDP(ZeRO):
    """A module under ZeRO-3: hooks do what `PlainZeRO` does in loops.

    model = FSDP(model, comm, blocks=model.layers)
    optimizer = torch.optim.AdamW(model.trained)
    loss_of(model(tokens)).backward()
    model.finish()
    optimizer.step()

    A block's parameters are whole in its forward, and from the beginning of its backward until its
    gradients are reduced. What is outside of blocks is whole from the model's forward to the end of
    its backward. Gradients are reduced as in stage 2.

    Parameters
    ----------
    module, comm
        As for `ZeRO`.
    blocks : iterable of nn.Module
        The layers. Each must be called as a module, since hooks see no other way in, and by all
        ranks alike: a rank that leaves one out would not gather it for the others.
    """

    def __init__(self, module: nn.Module, comm: Communicator, blocks: Iterable[nn.Module]) -> None:
        super().__init__(module, comm, 3, blocks)
        for owner, unit in self.owners:
            unit.reshard()
            if owner is not module:
                hook_block(owner, unit)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the module, with what is outside of the blocks whole."""
        outside = [unit for owner, unit in self.owners if owner is self.module]
        for unit in outside:
            unit.unshard()
        result = self.module(*inputs, **options)
        if not torch.is_grad_enabled():
            for unit in outside:
                unit.reshard()
        return result

    def reduce_next(self) -> None:
        """Free the parameters of the unit whose turn it is, and reduce its gradients."""
        self.units[self.next].reshard()
        super().reduce_next()

    def publish(self) -> None:
        """Do nothing: the next forward gathers the updated parameters."""


def hook_block(block: nn.Module, unit: Unit) -> None:
    """Have a unit whole while its block computes.

    forward    pre-hook: unshard │ compute │ hook: reshard
    backward   pre-hook: unshard │ compute │ last gradient arrives: reshard, reduce-scatter
    """

    def unshard(*_: object) -> None:
        if not unit.is_whole:
            unit.unshard()

    def reshard(*_: object) -> None:
        unit.reshard()

    block.register_forward_pre_hook(unshard)
    block.register_forward_hook(reshard)
    block.register_full_backward_pre_hook(unshard)

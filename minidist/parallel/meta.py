"""Models that are too large to be built: they begin on the device `meta`, where tensors have shapes and no bytes."""

from __future__ import annotations

import torch
from torch import nn


def on_device(model: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers from `meta` to `device`. Parameters still need no memory: all elements are one NaN.

    Shared parameters stay shared. A strategy then gives parameters memory, a part at a time.
    """
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in moved:
                nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=device).expand(parameter.shape)
                moved[parameter] = nn.Parameter(nothing, requires_grad=parameter.requires_grad)
            setattr(module, name, moved[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(
                name, torch.zeros_like(buffer, device=device), name not in module._non_persistent_buffers_set
            )

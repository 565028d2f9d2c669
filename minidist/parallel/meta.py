"""Models that are too large to be built: they begin on the device `meta`, where tensors have shapes and no bytes."""

import torch
from torch import nn
from torch.utils import swap_tensors


def on_device(model: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers from `meta` to `device`. Parameters still need no memory: all elements are one NaN.

    They stay the same objects, so what is shared stays shared. A strategy then gives them memory, a part at a time.
    """
    for parameter in tuple(model.parameters()):
        nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=device).expand(parameter.shape)
        swap_tensors(parameter, nn.Parameter(nothing, parameter.requires_grad))  # type: ignore[no-untyped-call]
    for buffer in tuple(model.buffers()):
        swap_tensors(buffer, torch.zeros_like(buffer, device=device))  # type: ignore[no-untyped-call]

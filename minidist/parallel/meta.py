"""Models that are too large to be built: they begin on the device `meta`, where tensors have shapes
and no bytes.
"""

from typing import Any

import torch
from torch import nn
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from minidist.comm import Communicator


class Computing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, a matrix product of this thread takes its operations / `flops` seconds on the
    rank's clock.

    With tensors on `meta` and a `Cluster`, whose `flops` they are, a real program tells in this way
    how long a step takes.
    """

    def __init__(self, comm: Communicator, flops: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.comm, self.flops = comm, flops

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Compute, then let the time pass."""
        options = kwargs or {}
        found = func(*args, **options)
        name = func.overloadpacket.__name__.removesuffix("_")  # addmm_ as addmm
        packet = getattr(torch.ops.aten, name, None)
        if count := flop_registry.get(packet):
            operations = count(*args, **options, out_val=found)
            self.comm.advance(operations / self.flops)
        return found


def on_device(model: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers from `meta` to `device`.

    Parameters still need no memory: all elements are one NaN.

    They stay the same objects, so what is shared stays shared. A strategy then gives them memory, a
    part at a time.
    """
    for parameter in tuple(model.parameters()):
        nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=device)
        shaped = nothing.expand(parameter.shape)
        swap_tensors(parameter, nn.Parameter(shaped, parameter.requires_grad))  # type: ignore[no-untyped-call]
    for buffer in tuple(model.buffers()):
        swap_tensors(buffer, torch.zeros_like(buffer, device=device))  # type: ignore[no-untyped-call]

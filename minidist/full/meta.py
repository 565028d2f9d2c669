"""Models that are too large to be built: they begin on the device `meta`, where tensors have shapes
and no bytes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from minidist.full.comm import Communicator


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

    They have no values yet: parameters are NaN, and need no memory, as all elements are one;
    buffers are zeros. They stay the same objects, so what is shared stays shared. A strategy then
    gives parameters memory, a part at a time.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta:
            continue
        if isinstance(tensor, nn.Parameter):
            nothing = torch.full((), torch.nan, dtype=tensor.dtype, device=device)
            made: Tensor = nn.Parameter(nothing.expand(tensor.shape), tensor.requires_grad)
        else:
            made = torch.zeros_like(tensor, device=device)
        vars(made).update(vars(tensor))
        swap_tensors(tensor, made)  # type: ignore[no-untyped-call]

"""The CPU in a GPU's place, for tests that want a GPU only to put their tensors there.

    torch.ones(4, device=rank)      _build_tensor(3).cuda(0)      DDP(model.cuda(rank), device_ids=[rank])
    └▶ torch.ones(4)                └▶ _build_tensor(3)           └▶ DDP(model)

What else a test may want of a GPU (streams, events, memory, its own kernels) is not there, and the
test fails: it does not apply then, and `not_applicable.toml` leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed import distributed_test as theirs

CPU = torch.device("cpu")


def is_gpu(place: object) -> bool:
    """Tell whether an argument names a GPU: by its number or by name."""
    if isinstance(place, torch.device):
        return place.type == "cuda"
    return isinstance(place, str) and place.startswith("cuda")


def moved(*args: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `to(...)`, with the CPU where they name a GPU."""
    to = tuple(CPU if is_gpu(one) or type(one) is int else one for one in args)
    place = options.get("device")
    if is_gpu(place) or type(place) is int:
        options["device"] = CPU
    return to, options


class OnTheCPU(TorchFunctionMode):
    """Has tensors stay on the CPU that would go to a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        to, options = moved(*args, **(kwargs or {}))
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*(to if func is torch.Tensor.to else args), **options)


@contextmanager
def gpus_replaced() -> Iterator[None]:
    """Have the whole process take the CPU for each rank's GPU in the body. Besides, each rank's
    thread enters `OnTheCPU`.
    """
    wrap: Any = DistributedDataParallel.__init__
    move: Any = torch.nn.Module.to

    def without_devices(self: Any, module: Any, *args: Any, **options: Any) -> None:
        options.pop("device_ids", None)
        options.pop("output_device", None)
        wrap(self, module, *((None, None, *args[2:]) if args else ()), **options)

    def module_to(self: Any, *args: Any, **options: Any) -> Any:
        to, options = moved(*args, **options)
        return move(self, *to, **options)

    with ExitStack() as stack:
        for where, name, stand_in in (
            (DistributedDataParallel, "__init__", without_devices),
            (torch.nn.Module, "to", module_to),
            (torch.nn.Module, "cuda", lambda self, device=None: self),
            (theirs, "init_multigpu_helper", lambda ranks, _: {one: [one] for one in range(ranks)}),
            (torch.cuda, "set_device", lambda device: None),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "synchronize", lambda device=None: None),
        ):
            stack.enter_context(mock.patch.object(where, name, stand_in))
        yield

"""The process group, as torch reaches it: through its dispatcher, as gloo's.

    dist.all_gather_into_tensor(out, shard)
      └▶ MinidistGroup._allgather_base           in Python, so that a call returns our `Working`
           └▶ torch's own, in C++                which reads the arguments, and dispatches
                └▶ c10d._allgather_base_         modes and subclasses of tensors see this operator
                     └▶ Operators._allgather_base_

A DTensor refuses to be reduced so, a subclass that has two tensors sends both, `CommDebugMode` and
the profiler count. The kernel stands under `BackendSelect`, which comes after modes and subclasses
and before every device's; for groups of others, and where a compiler or a DTensor asks for shapes
alone, it goes on to those.

In a call, `calling.works` has ours, of each thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from minidist.full.comm.communicator import Communicator
from minidist.torch_backend.operators import Operators
from minidist.torch_backend.work import held

SELECT: Any = torch._C.DispatchKey.BackendSelect
NAMES = (
    *("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "broadcast", "allgather", "allgather_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "scatter", "alltoall"),
    *("all_to_all_single", "barrier", "send", "recv", "recv_anysource"),
)


class MinidistGroup(dist.ProcessGroup):
    """A process group on a communicator."""

    def __init__(self, comm: Communicator, name: str) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]  # as Python's groups may
        self.comm, self._name, self._description = comm, name, ""
        self.operators, self.calling = Operators(comm), threading.local()

    # C++ asks by these names, Python by the properties
    def getBackendName(self) -> str:
        return "minidist"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _device_types = property(lambda self: [torch.device("cpu")])

    def shutdown(self) -> None:
        """Run the callbacks that nobody has waited for, unless an error ends the program. Else
        nothing is open but the stream, which ends when nobody holds the group.
        """
        if sys.exception() is None:
            self.operators.line.complete()

    def abort(self) -> None:
        """As `shutdown`."""

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """Wait for all ranks, in the same call."""
        self.operators.barrier(name="monitored_barrier").wait()

    def __repr__(self) -> str:
        return f"MinidistGroup({self.comm.name!r}, rank {self.comm.rank} of {self.comm.size})"


def dispatched(name: str) -> Callable[..., Any]:
    """Return the group's method of a name: torch's own, but it returns our `Working`."""
    call = getattr(dist.ProcessGroup, name)

    def method(self: MinidistGroup, *args: Any, **options: Any) -> Any:
        for arg in tree_leaves(args):
            if isinstance(arg, torch.Tensor) and arg.is_neg():
                raise ValueError(
                    f"{name}: torch would hand on a copy of a tensor with the negative bit, and "
                    "nothing would arrive: pass tensor.resolve_neg()"
                )
        works = self.calling.works = []
        work = call(self, *args, **options)
        self.calling.works = []
        return self.operators.all_of(works) if works else work

    # torch takes its own method where one of this name calls it, and not this one again
    method.__code__ = method.__code__.replace(co_name=name)
    return method


for _name in NAMES:
    setattr(MinidistGroup, _name, dispatched(_name))


@cache
def kernels() -> Any:
    """Have c10d's operators ask whether a group is ours, as long as the result is kept."""
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name in vars(Operators):
        if not name.startswith("__") and hasattr(torch.ops.c10d, name):
            run = kernel(getattr(torch.ops.c10d, name).default)
            library.impl(name, run, SELECT.name, with_keyset=True)
    return library


def kernel(operator: Any) -> Callable[..., Any]:
    """Return what runs in an operator's place."""
    schema = operator._schema
    names = [argument.name for argument in schema.arguments]
    at, reduces = names.index("process_group"), "reduce_op" in names
    name = schema.name.removeprefix("c10d::")

    def run(keys: Any, *args: Any) -> Any:
        group: Any = dist.ProcessGroup.unbox(args[at])
        only_shapes = any(isinstance(tensor, FakeTensor) for tensor in tree_leaves(args[:at]))
        if only_shapes or not isinstance(group, MinidistGroup):
            # This operator alone goes past the kernel: what it calls may need others that stand here.
            return operator.redispatch(keys & torch._C._dispatch_keyset_full_after(SELECT), *args)
        tensors, others = args[:at], args[at + 1 :]
        if reduces:
            others = dist.ReduceOp.RedOpType(others[0].op()), *others[1:]
        work = getattr(group.operators, name)(*tensors, *others)
        vars(group.calling).setdefault("works", []).append(work)
        boxed = held(work).boxed()
        return (args[0], boxed) if len(schema.returns) == 2 else boxed

    return run

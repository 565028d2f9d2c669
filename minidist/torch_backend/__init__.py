"""Floor 3: a backend of torch.distributed, so that programs of others run on our ranks unchanged.

    minidist.run(program, ranks=8, torch=True)          simulated ranks, also with cluster=
    python -m minidist launch -n 4 program.py           processes of MPI, told what torchrun tells
    with minidist.torch_backend.on(comm): ...                    on a communicator that exists

In each, `init_process_group("minidist")` and all that stands on it: DDP, `fully_shard`, DTensor.
Read `operators.py` first: c10d's calls, each mapped onto our collectives. `backend.py` is how torch's
dispatcher reaches them, `tensors.py` makes torch's tensors our buffers, `checks.py` refuses what
cannot be, `work.py` is what a call returns, and `to_self.py` has a rank's messages to itself.
`register.py` is how torch finds us, also under the names of other backends: `any_name.py`.

The rest is for simulated ranks, which share a process. `ranks.py` says which rank a thread is,
`worlds.py` runs a program on them and gives each its own default group,
`generators.py` its own default generator, and `waiting_store.py` is the store of them all.
"""

from minidist.torch_backend.backend import MinidistGroup
from minidist.torch_backend.register import on, register
from minidist.torch_backend.worlds import simulated

__all__ = ["MinidistGroup", "on", "register", "simulated"]

register()

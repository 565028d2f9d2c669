"""A training step whose gradients travel compressed, by minidist and by torch.

    torch PowerSGD      DistributedDataParallel over gloo, with torch's own powerSGD_hook
    PowerSGD            CompressedDDP on minidist's wire
    PowerSGD, gloo      CompressedDDP over gloo, as torch's: what differs is only what is computed
    DDP                 nothing is compressed

Factors have 4 columns, and torch's begins with its second step. On one machine bytes cost little, so
this measures what compressing costs; bytes are counted, and a slow network is simulated.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from minidist.bench.subject import Case, Setting, subject
from minidist.bench.training import BATCH, TIME, gpt, text, training_step
from minidist.full import DDP
from minidist.full.comm import Communicator
from minidist.full.ddp.compress.compressed import CompressedDDP
from minidist.further import compressor_of

COLUMNS = 4


@subject(peers=("DDP", "torch PowerSGD"))
def compress(setting: Setting) -> Iterator[Case]:
    """Seconds of a training step with PowerSGD at every width."""
    comm = setting.comm
    ways: dict[str, Communicator] = {"PowerSGD": comm}
    if setting.gloo is not None:
        ways["PowerSGD, gloo"] = over_gloo(setting.gloo)
    for hidden in setting.options.hidden:
        tokens = text(BATCH, TIME, seed=comm.rank)
        models: dict[str, nn.Module] = {"DDP": DDP(gpt(hidden), comm, op="sum")}
        for name, wire in ways.items():
            way = compressor_of(f"powersgd:{COLUMNS}")
            models[name] = CompressedDDP(gpt(hidden), wire, op="sum", compress=way)
        if setting.gloo is not None:
            models["torch PowerSGD"] = torchs(gpt(hidden))
        runs = {name: training_step(model, tokens) for name, model in models.items()}
        yield Case(f"D={hidden}, {BATCH} x {TIME}", runs)


def over_gloo(gloo: Any) -> Communicator:
    """Return minidist's communicator over torch's group of all ranks."""
    from minidist.full.comm.torch_wire.store import StoreMailbox
    from minidist.full.comm.torch_wire.torch_wire import communicator

    return communicator(gloo.group.WORLD, 300.0, StoreMailbox)


def torchs(model: nn.Module) -> nn.Module:
    """Return torch's DDP with its PowerSGD."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    wrapped = nn.parallel.DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=COLUMNS,
        start_powerSGD_iter=2,
        min_compression_rate=1,
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped

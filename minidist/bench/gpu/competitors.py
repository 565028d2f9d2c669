"""The same training step by each competitor, on one device: a GPT in bfloat16 with fused AdamW.

    name                    model                                       16 bits by
    no strategy             the bare model                              autocast
    torch DDP               DistributedDataParallel                     autocast
    DDP, ZeRO-1             minidist.full                           autocast
    fully_shard             torch's, each block and the rest a unit     its MixedPrecisionPolicy
    fully_shard, forward    the same, compiled in our way               its MixedPrecisionPolicy
    FSDP                    minidist.full, the same units           MixedPrecision
    FSDP, fp8               the same, its products in 8 bits            MixedPrecision

The loss and each block's forward are compiled (`compile_blocks`); in `fully_shard` the block itself
is, which is torchtitan's way. It is not certain which suits torch better, so both take part when
blocks are compiled. Ours recompute by `recompute`, the others by torch's `checkpoint_wrapper`,
which torchtitan uses as well.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from minidist.bench.measure import Run
from minidist.bench.training import adamw_step, forward_backward, text
from minidist.full import DDP, FSDP, DataParallel, MixedPrecision, ZeRO1, compile_blocks
from minidist.full.comm import Communicator
from minidist.full.layers.blocks import blocks_of
from minidist.full.model import GPT, GPTConfig, cross_entropy_sum
from minidist.full.precision.fp8 import to_fp8, update_scales
from minidist.full.recompute.segments import recompute

BITS = torch.bfloat16
OURS: dict[str, Callable[[nn.Module, Communicator], DataParallel]] = {
    "DDP": partial(DDP, op="sum"),
    "ZeRO-1": partial(ZeRO1, op="sum"),
    **dict.fromkeys(("FSDP", "FSDP, fp8"), partial(FSDP, op="sum", precision=MixedPrecision(BITS))),
}
# these cast weights themselves
SHARDED = ("fully_shard", "fully_shard, forward", "FSDP", "FSDP, fp8")


class Work(NamedTuple):
    """What all competitors of a case do. `backend` is that of the compiler; without one nothing is
    compiled.
    """

    config: GPTConfig
    batch: int
    device: torch.device
    backend: str = ""
    recompute: bool = False

    @property
    def name(self) -> str:
        """Such as `4 x 2048 compiled, recompute`."""
        how = "compiled" if self.backend else "eager"
        return f"{self.batch} x {self.config.sequence} {how}{', recompute' * self.recompute}"

    @property
    def flops(self) -> int:
        """Floating point operations of a step; recomputed ones do not count."""
        return self.config.flops_per_token() * self.batch * self.config.sequence


def build(name: str, work: Work, comm: Communicator) -> tuple[nn.Module, Run]:
    """Return a competitor's model as it is spread, and its step, which returns the loss.

    All competitors start from the same weights, and see the same tokens.
    """
    model = GPT(work.config, device="meta").to_empty(device=work.device)
    generator = torch.Generator(work.device).manual_seed(0)
    for parameter in model.parameters():  # drawn on the device: a CPU takes a minute for a billion
        # those of norms are about 1
        nn.init.normal_(parameter, float(parameter.dim() == 1), 0.02, generator)
    if name == "FSDP, fp8":
        to_fp8(model)
    spread = OURS[name](model, comm) if name in OURS else by_torch(name, model, work)
    if work.recompute and name in OURS:
        recompute(model, "full")
    if work.backend and name == "fully_shard":
        for block in blocks_of(model):
            block.compile(backend=work.backend)
    elif work.backend:
        compile_blocks(blocks_of(model), work.backend)
    tokens = text(work.batch, work.config.sequence, 1, work.config.vocabulary).to(work.device)
    called = torch.autocast(work.device.type, BITS, enabled=name not in SHARDED)(spread.__call__)
    loss = (
        torch.compile(cross_entropy_sum, backend=work.backend)
        if work.backend
        else cross_entropy_sum
    )
    backward = forward_backward(called, tokens, loss=loss)

    def scaled() -> Tensor:
        found = backward()
        update_scales(model)  # of products in 8 bits, if there are any
        return found

    return spread, adamw_step(spread, scaled, fused=True)


def by_torch(name: str, model: GPT, work: Work) -> nn.Module:
    """Let a model recompute, and wrap it, in the order of torchtitan."""
    if work.recompute:
        for number, layer in model.layers.named_children():
            model.layers.register_module(number, checkpoint_wrapper(layer))
    if name == "torch DDP":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if name in SHARDED:
        mesh = init_device_mesh(work.device.type, (1,))
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(BITS, reduce_dtype=BITS))
    return model

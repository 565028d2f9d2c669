"""A training step with experts on as many ranks as there are, of which each token goes to two.

    ep             minidist: DDP, and the experts shared out; tokens go where the router sends them
    torch          the same, but for what lies between sorting and unsorting: all_to_all_single over gloo and
                   F.grouped_mm, as torchtitan writes it, under DistributedDataParallel
    ep balanced    as ep, with tokens dealt out in turn, so that all experts have as many
    dense          minidist's DDP of a model without experts that multiplies as much for a token: an MLP twice as wide
    bytes alone    the exchanges of `ep balanced` and nothing else

AdamW is torch's fused one in all: a model with experts has more parameters, though it multiplies no
more for a token. What experts cost beside a dense model of equal work is `ep balanced` less `bytes
alone`, over `dense`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.bench.options import EXPERTS, LAYERS
from minidist.bench.subject import Case, Setting, subject
from minidist.bench.training import BATCH, TIME, expect_same, gpt, text, training_step
from minidist.full import DDP
from minidist.full.adjoint import all_to_all
from minidist.full.comm import Communicator
from minidist.full.expert.expert_parallel import parallelize_experts
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPT
from minidist.full.model.moe.routed import RoutedExperts, routed_in

CHOSEN = 2  # experts of a token


@subject(peers=("torch", "dense"))
def experts(setting: Setting) -> Iterator[Case]:
    """Seconds of a training step at every width."""
    comm, tokens = setting.comm, text(seed=setting.comm.rank)
    mesh = Mesh(comm, Layout(dp=comm.size, ep=comm.size))
    for hidden in setting.options.hidden:
        width = 4 * hidden // 3 // 16 * 16
        ours, even, theirs = (with_experts(hidden, width, mesh) for _ in range(3))
        for layer in routed_in(even):
            layer.choose = in_turn  # type: ignore[method-assign]
        models = {
            "ep": ours,
            "ep balanced": even,
            "dense": gpt(hidden, intermediate=CHOSEN * width),
        }
        runs = {
            name: training_step(DDP(model, comm, op="sum"), tokens, fused=True)
            for name, model in models.items()
        }
        runs["bytes alone"] = partial(exchanges, comm, hidden)
        if setting.gloo is not None:
            runs["torch"] = training_step(by_torch(theirs), tokens, fused=True)
            first: Any = runs["ep"]()
            expect_same({"ep": first * comm.size, "torch": runs["torch"]()}, 1e-4)
        yield Case(f"D={hidden}, {BATCH} x {TIME}", runs)


def with_experts(hidden: int, width: int, mesh: Mesh) -> GPT:
    """Return a model with this rank's experts, each so wide."""
    model = gpt(
        hidden,
        intermediate=width,
        experts=EXPERTS,
        top_k=CHOSEN,
    )
    parallelize_experts(model, mesh)
    return model


def in_turn(scores_BTE: Tensor) -> Tensor:
    """Choose two experts after the other for each token [B, T, k], whatever the scores."""
    numbers = torch.arange(scores_BTE[..., :CHOSEN].numel(), device=scores_BTE.device) % EXPERTS
    return numbers.view(*scores_BTE.shape[:-1], CHOSEN)


def exchanges(comm: Communicator, hidden: int) -> None:
    """Send what a step sends to experts and back, in forward and backward, of each layer."""
    rows = torch.zeros(CHOSEN * BATCH * TIME, hidden)
    for _ in range(4 * LAYERS):
        all_to_all(rows, comm)


# ---------------------------------------------------------------- by torch


def by_torch(model: GPT) -> nn.Module:
    """Return the model, whose experts are shared out already, to be trained by torch alone."""
    from torch.nn.parallel import DistributedDataParallel

    for layer in routed_in(model):
        layer.compute = torchs_dispatch(layer)
        # the other's gradients are averaged, those of experts come whole
        for parameter in layer.experts.parameters():
            parameter.register_hook(lambda gradient: gradient / torch.distributed.get_world_size())  # type: ignore[no-untyped-call]
    apart = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, apart)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(model)


def torchs_dispatch(layer: RoutedExperts) -> Callable[[Tensor, list[int]], Tensor]:
    """Return what sends rows, sorted by expert, to the experts of all ranks, and brings back what
    they make.
    """
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        distributed: Any = torch.distributed
        group, ranks = distributed.group.WORLD, distributed.get_world_size()
        leaving = torch.tensor(counts)
        arriving = torch.empty_like(leaving)
        distributed.all_to_all_single(arriving, leaving)
        sent, came = (numbers.view(ranks, -1).sum(1).tolist() for numbers in (leaving, arriving))
        received: Tensor = all_to_all_single_autograd(rows, came, sent, group)
        owners = torch.arange(len(arriving)) % (EXPERTS // ranks)
        order = owners.repeat_interleave(arriving).argsort(stable=True)
        ends = arriving.view(ranks, -1).sum(0).cumsum(0).to(torch.int32)
        held = layer.experts
        x = received[order]
        gate, up = (
            F.grouped_mm(x, weight.transpose(1, 2), offs=ends) for weight in (held.gate, held.up)
        )
        made = F.grouped_mm(
            F.silu(gate) * up,
            held.down.transpose(1, 2),
            offs=ends,
        )
        unsorted = torch.empty_like(made).index_copy(0, order, made)
        return all_to_all_single_autograd(unsorted, sent, came, group)

    return compute

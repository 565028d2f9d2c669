"""Experts of a serial model, shared out among ranks; all other parameters stay as they are.

    dp x cp ranks        edp copies of a group of ep neighbours; along tp, too, ranks have other experts
    router, attention    on every rank; gradients are summed over dp and cp together
    expert e             on one rank of each group of ep x tp; gradients are summed over its edp copies

A rank's gradient of an expert has the terms of all tokens that came to it, from all ranks of its
group. So the sum over the copies is the whole gradient: nothing is divided by ep, and nothing
counts ep times. Whole experts are shared out along tp as well, instead of cutting each: the
matrices stay large. There each rank routes some of the tokens (see `SplitTokens`), which without
sequence parallelism all ranks have.

The record of an expert's parameter (`Block`, along dim 0) says which experts these are,
and `ExpertGroups` among which ranks; data parallelism, ZeRO, clipping and checkpoints read them.
(Singh et al. 2023; Liu et al. 2025, "MoE parallel folding".)
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

from torch import Tensor, nn

from minidist.full.adjoint import reduce_from
from minidist.full.collectives.fast import cut
from minidist.full.expert.dispatch import Dispatch
from minidist.full.expert.options import WAYS
from minidist.full.mesh import Layout, Mesh
from minidist.full.model.moe.balance import rebalance, sizes_of
from minidist.full.model.moe.routed import RoutedExperts, routed_in
from minidist.full.optimizer.guard import guard_blocks
from minidist.full.placement import (
    Block,
    ExpertGroups,
    check_serial,
    record,
    shard,
)
from minidist.full.recipe import Recipe
from minidist.full.strategy import Facts, Parallel, Strategy


class ExpertParallelism(Strategy):
    """Leaves this rank's experts, and moves the biases of routers.

    A checkpoint keeps the biases.
    """

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """Every rank of ep and tp gets an expert.

        Experts have fewer copies than all else, which some strategies do not know.
        """
        if not self.wanted(recipe, layout, facts):
            return
        ep, way = f"ep={layout.ep}", recipe.ep_comm
        whole = {
            recipe.strategy: recipe.strategy != "ddp",
            f"hsdp={recipe.hsdp}": recipe.hsdp > 0,
        }
        for what, asked in whole.items():
            if asked and layout.ep > 1:
                yield (
                    f"{ep}: experts have fewer copies than all else, which {what} does not know: "
                    "leave it out"
                )
        if way not in WAYS:
            yield f"there is no way {way!r} to reach experts: choose one of {', '.join(WAYS)}"
        if not facts.experts:
            yield f"{ep}: the model has no experts to share out: give it some, or use ep=1"
        groups = layout.groups(("ep", "tp"))
        if facts.experts < (ranks := len(groups[0])):
            yield (
                f"{ep}: {facts.experts} experts are fewer than the {ranks} ranks of ep and tp: use "
                f"at most {facts.experts}"
            )
        if way == "hierarchical" and ranks > 1 and facts.nodes:
            yield from (fault for group in groups if (fault := levels_fault(group, facts.nodes)))

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """The model has experts, or the mesh has an axis for them."""
        return layout.ep > 1 or facts.experts > 0

    def check(self, model: nn.Module, mesh: Mesh, recipe: Recipe) -> tuple[int, int] | None:
        """Return the layers and experts of the whole model: a rank may have none of its layers."""
        return sizes_of(model)

    def apply(self, parallel: Parallel, checked: Any) -> None:
        """Share the experts out."""
        recipe = parallel.recipe
        share_experts(parallel.model, parallel.mesh, recipe.ep_comm, recipe.ep_fp8)

    def words(self, recipe: Recipe, mesh: Mesh) -> str:
        """Name the way of tokens to experts on other ranks, if there are any."""
        if mesh.ep.size == 1:
            return ""
        bits = ", in 8 bits" if recipe.ep_fp8 else ""
        return f"ep={mesh.ep.size} ({recipe.ep_comm}{bits})"

    def after_step(self, parallel: Parallel) -> None:
        """Move biases by the load that all ranks of the site saw, and keep that to report it."""
        site = parallel.mesh.site
        sizes = parallel.applied[self]
        parallel.load = rebalance(parallel.model, partial(reduce_from, comm=site), sizes)

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the biases of routers that are balanced by them."""
        return {
            f"biases/{layer.index}": layer.bias
            for layer in routed_in(model)
            if layer.config.balance == "bias"
        }


def parallelize_experts(
    model: nn.Module, mesh: Mesh, way: str = "direct", fp8: bool = False
) -> None:
    """Leave this rank's experts of a serial model, in place. Collective.

    Apply it before tensor parallelism, and before any strategy over the data axis. All ranks must
    have the same values.

    Parameters
    ----------
    way : {"direct", "hierarchical"}
        How rows travel: in one exchange, or inside nodes first (see `dispatch.py`).
    fp8 : bool
        Send rows to their experts in 8 bits.

    Raises
    ------
    ValueError
        If there is no such way, or there are no experts, or fewer than ranks of `ep` and `tp`
        together; if tensor parallelism or a strategy over the data axis came first; for
        "hierarchical", unless such a group has several nodes of as many neighbouring ranks each.
    """
    routed = routed_in(model)
    facts = Facts(0, routed[0].config.experts if routed else 0, tuple(mesh.world.nodes))
    for fault in ExpertParallelism().faults(Recipe(ep_comm=way, ep_fp8=fp8), mesh.layout, facts):
        raise ValueError(fault)
    check_serial(model, "parallelize_experts")
    share_experts(model, mesh, way, fp8)


def share_experts(model: nn.Module, mesh: Mesh, way: str, fp8: bool) -> None:
    """Leave this rank's experts of a serial model. Collective."""
    comm = mesh.over("ep", "tp")
    if comm.size == 1:
        return
    guard_blocks(model)
    groups = ExpertGroups(mesh.ep, mesh.data if mesh.layout.ep == 1 else mesh.over("edp"))
    levels = comm.levels(len(comm.node)) if way == "hierarchical" else None
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            bounds = tuple(pairwise((0, *accumulate(cut(layer.config.experts, comm.size)))))
            for label, parameter in layer.experts.named_parameters():
                shard(
                    parameter,
                    Block(f"{name}.experts.{label}", parameter.shape, 0, bounds, 1, comm),
                )
                record(parameter, experts=groups)
            layer.experts.numbers = range(*bounds[comm.rank])
            layer.compute = Dispatch(layer.experts, comm, levels, fp8)


def levels_fault(group: tuple[int, ...], nodes: Sequence[object]) -> str:
    """Return why these ranks cannot exchange tokens inside nodes first, then across; or nothing."""
    runs = [(node, len(list(ranks))) for node, ranks in groupby(group, key=nodes.__getitem__)]
    sizes = [size for _, size in runs]
    twice = len({node for node, _ in runs}) < len(runs)
    if len(runs) > 1 and not twice and set(sizes) == {sizes[0]} and sizes[0] > 1:
        return ""
    return (
        "a hierarchical exchange needs several nodes of as many ranks each, at least 2, but the "
        f"ranks {', '.join(map(str, group))} lie on nodes of {', '.join(map(str, sizes))}: use the "
        "way 'direct'"
    )

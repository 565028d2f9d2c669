"""Experts of a serial model, shared out among ranks; all other parameters stay as they are.

    dp x cp ranks        edp copies of a group of ep neighbours; along tp, too, ranks have other experts
    router, attention    on every rank; gradients are summed over dp and cp together
    expert e             on one rank of each group of ep x tp; gradients are summed over its edp copies

A rank's gradient of an expert has the terms of all tokens that came to it, from all ranks of its
group. So the sum over the copies is the whole gradient: nothing is divided by ep, and nothing
counts ep times. Whole experts are shared out along tp as well, instead of cutting each: the
matrices stay large. There each rank routes some of the tokens (see `SplitTokens`), which without
sequence parallelism all ranks have.

The record of an expert's parameter (`TensorPlacement`, along dim 0) says which experts these are,
and `ExpertGroups` among which ranks; data parallelism, ZeRO, clipping and checkpoints read them.
(Singh et al. 2023; Liu et al. 2025, "MoE parallel folding".)
"""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

from torch import Tensor, nn

from minidist.collectives.fast import cut
from minidist.memory.hooks import check_unwrapped
from minidist.mesh import Layout, Mesh
from minidist.model.moe import RoutedExperts, rebalance, routed_in
from minidist.parallel.adjoint import reduce_from
from minidist.parallel.expert.dispatch import Dispatch
from minidist.parallel.expert.options import WAYS
from minidist.parallel.expert.plain import plain_dispatch
from minidist.parallel.optimizer.guard import GuardOfBlocks
from minidist.parallel.placement import ExpertGroups, TensorPlacement, shard, tensor_placement_of
from minidist.parallel.recipe import Recipe, RecipeError
from minidist.parallel.strategy import Facts, Parallel, Strategy


class ExpertParallelism(Strategy):
    """Leaves this rank's experts, and moves the biases of routers. A checkpoint keeps
    the biases.
    """

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """Experts have fewer copies than all else, which some strategies do not know."""
        if layout.ep == 1:
            return
        whole = {
            recipe.strategy: recipe.strategy != "ddp",
            "ZeRO++": recipe.zeropp,
            f"hsdp={recipe.hsdp}": recipe.hsdp > 0,
        }
        for what, asked in whole.items():
            if asked:
                yield (
                    f"ep={layout.ep}: experts have fewer copies than all else, which {what} does "
                    "not know: leave it out"
                )

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """The model has experts, or the mesh has an axis for them."""
        return layout.ep > 1 or facts.experts > 0

    def check(self, model: nn.Module, mesh: Mesh, recipe: Recipe) -> None:
        """Ask the model how many experts it has, and the mesh where ranks lie."""
        try:
            check_experts(model, mesh, recipe.ep_comm, recipe.ep_fp8)
        except ValueError as error:
            raise RecipeError(f"ep={mesh.layout.ep}: {error}") from None

    def apply(self, parallel: Parallel, checked: Any) -> None:
        """Share the experts out."""
        recipe = parallel.recipe
        share_experts(parallel.model, parallel.mesh, recipe.ep_comm, recipe.ep_fp8)

    def after_step(self, parallel: Parallel) -> None:
        """Move biases by the load that all ranks saw, and keep that to report it."""
        world = parallel.mesh.world
        parallel.load = rebalance(parallel.model, partial(reduce_from, comm=world))

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
    way : {"direct", "hierarchical", "plain"}
        How rows travel: in one exchange, inside nodes first (see `dispatch.py`), or as on the plain
        page.
    fp8 : bool
        Send rows to their experts in 8 bits.

    Raises
    ------
    ValueError
        As `check_experts`.
    """
    check_experts(model, mesh, way, fp8)
    share_experts(model, mesh, way, fp8)


def share_experts(model: nn.Module, mesh: Mesh, way: str, fp8: bool) -> None:
    """Leave this rank's experts of a model that `check_experts` has looked at. Collective."""
    comm = mesh.over("ep", "tp")
    if comm.size == 1:
        return
    GuardOfBlocks(model)
    groups = ExpertGroups(mesh.ep, mesh.data if mesh.layout.ep == 1 else mesh.over("edp"))
    levels = comm.levels(len(comm.node)) if way == "hierarchical" else None
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            bounds = tuple(pairwise((0, *accumulate(cut(layer.config.experts, comm.size)))))
            for label, parameter in layer.experts.named_parameters():
                shard(
                    parameter,
                    TensorPlacement(f"{name}.experts.{label}", parameter.shape, 0, bounds, 1, comm),
                )
                parameter.expert_groups = groups  # type: ignore[attr-defined]
            plain = partial(plain_dispatch, experts=layer.experts, comm=comm)
            layer.compute = plain if way == "plain" else Dispatch(layer.experts, comm, levels, fp8)


def check_experts(model: nn.Module, mesh: Mesh, way: str = "direct", fp8: bool = False) -> None:
    """Find out whether a model's experts can be shared out over a mesh. Sends nothing.

    Raises
    ------
    ValueError
        If there is no such way, or there are no experts, or fewer than ranks of `ep` and `tp`
        together; if tensor parallelism or a strategy over the data axis came first; for
        "hierarchical", unless such a group has several nodes of as many neighbouring ranks each.
    """
    layout, found = mesh.layout, routed_in(model)
    check_unwrapped(model, "parallelize_experts")
    for name, parameter in model.named_parameters():
        if tensor_placement_of(parameter) is not None:
            fault = (
                f"{name} has been cut or recorded by an earlier call, and experts are shared out "
                "whole"
            )
            raise ValueError(
                f"{fault}: call parallelize_experts once, and before parallelize_tensor"
            )
    groups = layout.groups(("ep", "tp"))
    if way not in WAYS:
        raise ValueError(
            f"there is no way {way!r} to reach experts: choose one of {', '.join(WAYS)}"
        )
    if way == "plain" and fp8:
        raise ValueError(
            "the plain page sends nothing in 8 bits: use the way 'direct', or leave fp8 out"
        )
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts to share out: give it some, or use ep=1"
        )
    if (experts := found[0].config.experts) < (ranks := len(groups[0])):
        raise ValueError(
            f"{experts} experts are fewer than the {ranks} ranks of ep and tp: use at most "
            f"{experts}"
        )
    for group in groups if way == "hierarchical" and ranks > 1 else ():
        nodes = [key for key, _ in groupby(group, key=lambda rank: mesh.world.nodes[rank])]
        sizes = [len(set(node) & set(group)) for node in nodes]
        if (
            len(nodes) == 1
            or len(set(nodes)) < len(nodes)
            or set(sizes) != {sizes[0]}
            or sizes[0] == 1
        ):
            fault = (
                f"the ranks {', '.join(map(str, group))} lie on nodes of "
                f"{', '.join(map(str, sizes))}"
            )
            needed = "a hierarchical exchange needs several nodes of as many ranks each, at least 2"
            raise ValueError(f"{needed}, but {fault}: use the way 'direct'")

"""Steps of `parallelize` that a recipe decides on: adapters, experts, strategy over the data axis,
recomputation.
"""

import torch
from torch import nn

from minidist.memory.adapters import add_lora, add_qlora
from minidist.memory.recompute.segments import recompute
from minidist.mesh import Mesh
from minidist.model.moe import routed_in
from minidist.parallel.data.buckets import MIB
from minidist.parallel.data.data_parallel import DDP
from minidist.parallel.data.plain import NaiveDataParallel, ParameterServer
from minidist.parallel.expert.expert_parallel import check_experts
from minidist.parallel.recipe import Recipe, RecipeError
from minidist.parallel.replica import Alone, Replica
from minidist.parallel.sharded.fsdp import FSDP
from minidist.parallel.sharded.zero import ZeRO1, ZeRO2
from minidist.parallel.sharded.zero_plus_plus import ZeROPlusPlus


def adapt(model: nn.Module, recipe: Recipe, generator: torch.Generator | None = None) -> None:
    """Put adapters beside the layers of a serial model, if the recipe has some."""
    if recipe.lora:
        (add_qlora if recipe.qlora else add_lora)(model, recipe.lora, generator=generator)


def check_recipe_of_experts(model: nn.Module, mesh: Mesh, recipe: Recipe) -> None:
    """Raise RecipeError if the recipe or the mesh does not go with a model's experts, or with its
    having none.
    """
    for name in ("fp8", "qlora"):
        if getattr(recipe, name) and routed_in(model):
            raise RecipeError(
                f"{name}=True is for linear layers, and experts are none: leave it out"
            )
    if mesh.layout.ep > 1 or routed_in(model):
        try:
            check_experts(model, mesh, recipe.ep_comm, recipe.ep_fp8)
        except ValueError as error:
            raise RecipeError(f"ep={mesh.layout.ep}: {error}") from None


def replicate(model: nn.Module, mesh: Mesh, recipe: Recipe) -> Replica:
    """Apply the recipe's strategy over the data axis, if that has several ranks. Collective.

    Gradients are summed: the loss is divided by the tokens of all ranks.
    """
    if mesh.data.size == 1:
        return Alone(model)
    if plain := {"naive": NaiveDataParallel, "server": ParameterServer}.get(recipe.strategy):
        return plain(model, mesh.data, "sum")
    if recipe.zeropp:
        return ZeROPlusPlus(
            model, mesh.data, "sum", node_ranks=recipe.node_ranks, allocate=recipe.allocate
        )
    if recipe.zero == 3:
        return FSDP(
            model, mesh.data, "sum", shard_ranks=recipe.shard_ranks, allocate=recipe.allocate
        )
    kind = (DDP, ZeRO1, ZeRO2)[recipe.zero]
    first = min(MIB, recipe.bucket_bytes)  # a small first bucket: see `Bucketed`
    return kind(model, mesh.data, "sum", bucket_bytes=recipe.bucket_bytes, first_bucket_bytes=first)


def recompute_blocks(model: nn.Module, policy: str) -> None:
    """Apply a policy of recomputation to a stage, which may have fewer layers than a segment."""
    if policy == "none":
        return
    kind, _, length = policy.partition(" ")
    recompute(
        model, f"every {min(int(length), len(blocks_of(model)))}" if kind == "every" else policy
    )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules in a model's list `layers`; none if it has no such list."""
    layers = getattr(model, "layers", None)
    return list(layers.children()) if isinstance(layers, nn.ModuleList) else []

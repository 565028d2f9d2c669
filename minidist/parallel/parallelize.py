"""A serial model, spread over a mesh: every strategy in one order.

    model, the same on every rank, with adapters if the recipe has some
      │    expert parallelism                   leaves this rank's experts
      │ 1  tensor (and sequence) parallelism    leaves this rank's block of each matrix
      │ 2  pipeline                             leaves the layers of this rank's stages
      │    products in 8 bits                   of the layers that are left
      │ 3  data parallelism or ZeRO             reduces the gradients of what is left, or shards it
      │ 4  recomputation                        of the layers that are left, segment by segment
      │    context parallelism                  lets their attention reach the tokens of other ranks
      │    compiling                            of each layer's forward
      ▼ 5  optimizer                            over what this rank updates
    Parallel.step(...)

The order follows the links: the axis that sends most often is cut first, and is innermost in the
mesh. Each step sees only what the step before has left. That is why they combine: ZeRO shards
blocks of layers as it would shard layers. (Narayanan et al. 2021, section 3; Llama 3, 2024, section
3.3.2.)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from minidist.collectives import broadcast
from minidist.memory.precision.fp8 import to_fp8, update_scales
from minidist.mesh import Mesh
from minidist.model.moe import Load, rebalance, routed_in
from minidist.parallel.adjoint import reduce_from
from minidist.parallel.clip import clip_by_global_norm
from minidist.parallel.compiled import as_they_were, compile_blocks, name_of
from minidist.parallel.context.context_parallel import (
    attend_alone,
    check_context,
    parallelize_context,
)
from minidist.parallel.data.replicas import make_equal
from minidist.parallel.expert.expert_parallel import parallelize_experts
from minidist.parallel.optimizer.elementwise import check_elementwise
from minidist.parallel.pipeline import with_communication
from minidist.parallel.pipeline.actions import Plan
from minidist.parallel.pipeline.executor import Pipeline, Tensors, tie_stages
from minidist.parallel.pipeline.stage import balance, take_stages, tied_names
from minidist.parallel.placement import record_stages, tensor_placement_of
from minidist.parallel.recipe import Recipe, RecipeError
from minidist.parallel.replica import Optimizer, Replica
from minidist.parallel.steps import (
    adapt,
    blocks_of,
    check_recipe_of_experts,
    recompute_blocks,
    replicate,
)
from minidist.parallel.tensor.plan import Plan as TensorPlan
from minidist.parallel.tensor.plan import check_plan, split_equal
from minidist.parallel.tensor.sequence import know_all_tokens
from minidist.parallel.tensor.styles import Style

Loss = Callable[[Tensor, Any], Tensor]


@dataclass(eq=False)
class Parallel:
    """This rank's part of a model that is spread over a mesh, and how all ranks take a step
    together.

    Attributes
    ----------
    model : nn.Module
        The part of the serial model that this rank holds. Parameters keep their serial names.
    mesh, recipe, loss
        As given to `parallelize`.
    replica : Replica
        The strategy over the data axis.
    pipeline : Pipeline or None
        None if the mesh has no pipeline.
    load : Load or None
        How evenly the last step has loaded the experts of all ranks; None if the model has none.
    """

    model: nn.Module
    mesh: Mesh
    recipe: Recipe
    loss: Loss
    replica: Replica
    pipeline: Pipeline | None = None
    load: Load | None = None

    @property
    def kept(self) -> list[nn.Parameter]:
        """What a checkpoint keeps of this rank; see `Replica.kept`."""
        return self.replica.kept

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.replica.zero_grad()

    def step(
        self, inputs: Sequence[Any], targets: Sequence[Any], *arguments: Sequence[Any]
    ) -> Tensor:
        """Run forward and backward of all microbatches; return the sum of the losses that this rank
        has computed.

        Parameters
        ----------
        inputs, targets : sequences
            One for each microbatch; they differ along the data axis, and are the same along the
            others. With context parallelism each rank brings its own tokens; see `shard_tokens`.
        arguments : sequences
            Further arguments of the model, one for each microbatch.

        Gradients are summed over microbatches and over the data axis. In a pipeline, only ranks of
        the last stage compute losses, and the others return zero; along the tensor axis all ranks
        return the same.

        Raises
        ------
        ValueError
            If there are more or fewer inputs than the recipe has microbatches.
        """
        total = (self._accumulate if self.pipeline is None else self.pipeline.step)(
            inputs, targets, *arguments
        )
        if self.recipe.fp8:  # scales follow what all ranks saw in this step
            # parts of one tensor lie on ranks of two axes
            update_scales(self.model, self.mesh.data, self.mesh.tp)
        # as do the biases of routers
        self.load = rebalance(self.model, partial(reduce_from, comm=self.mesh.world))
        return total

    @torch.no_grad()
    def evaluate(
        self, inputs: Sequence[Any], targets: Sequence[Any], *arguments: Sequence[Any]
    ) -> Tensor:
        """Run forward alone, as in evaluation; return the sum of the losses, as `step` does.
        Collective.

        No gradient, scale or load of experts changes, and each module is then in the mode in which
        it was.
        """
        stages = self.pipeline.stages.values() if self.pipeline else [self.replica.called]
        modes = {module: module.training for stage in stages for module in stage.modules()}
        try:
            for module in modes:
                module.training = False
            if self.pipeline is not None:
                return self.pipeline.evaluate(inputs, targets, *arguments)
            total = torch.zeros((), device=next(self.model.parameters()).device)
            for x, target, *rest in zip(inputs, targets, *arguments, strict=True):
                total = total + self.loss(self.replica.called(x, *rest), target)
            return total
        finally:
            for module, training in modes.items():
                module.training = training

    def _accumulate(
        self, inputs: Sequence[Any], targets: Sequence[Any], *arguments: Sequence[Any]
    ) -> Tensor:
        """Run forward and backward of all microbatches without a pipeline; return the sum of the
        losses.
        """
        if len(inputs) != (count := self.recipe.microbatches):
            raise ValueError(
                f"{len(inputs)} inputs, but the recipe has microbatches={count}: bring so many"
            )
        total = torch.zeros((), device=next(self.model.parameters()).device)
        called, comm = self.replica.called, self.mesh.world
        for number, (x, target, *rest) in enumerate(zip(inputs, targets, *arguments, strict=True)):
            with self.replica.no_sync() if number + 1 < len(inputs) else nullcontext():
                with comm.span("forward"):
                    loss = self.loss(called(x, *rest), target)
                with comm.span("backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        self.replica.synchronize()
        return total

    def optimizer(
        self,
        kind: Callable[..., Optimizer],
        groups: ParamsT,
        elementwise: bool = False,
        **options: Any,
    ) -> Optimizer:
        """Return an optimizer of this `kind` over what this rank updates; see `Replica.optimizer`.

        `groups` are over this rank's parameters, those of `model`. Others are refused with
        ValueError.
        """
        optimizer = self.replica.optimizer(kind, groups, elementwise, **options)
        if self.mesh.tp.size * self.mesh.ep.size > 1:
            check_elementwise(optimizer, elementwise)
        return optimizer

    def stepped(self) -> None:
        """Let parameters follow `replica.trained`, after something other than the optimizer has
        changed it.
        """
        self.replica.stepped()

    def clip(self, limit: float) -> Tensor:
        """Clip by the global norm over the mesh, and return it; see `clip_by_global_norm`.
        Collective.
        """
        return clip_by_global_norm(self.kept, limit, self.mesh.pp)

    def unwrap(self) -> None:
        """End training: gather what ZeRO 3 has cut along the data axis, attend alone, compile
        nothing. Collective.
        """
        self.replica.unwrap()
        attend_alone(self.model)
        if self.recipe.compile:
            as_they_were(blocks_of(self.model))

    def whole_parameters(self, names: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter of the serial model whole, on every rank, one by one; after
        `unwrap`. Collective.

        `names` are the `named_parameters` of the serial model, which may be on the device `meta`.

        Cost: for each parameter an all-gather along the tensor axis, and a broadcast along the
        pipeline axis.
        """
        mine = dict(self.model.named_parameters(remove_duplicate=False))
        holders = [set(held) for held in self.mesh.pp.roll_call(sorted(mine))]
        device = next(self.model.parameters()).device
        for name, like in names:
            holder = next(rank for rank, held in enumerate(holders) if name in held)
            whole = torch.empty(like.shape, dtype=like.dtype, device=device)
            if name in mine:
                placement = tensor_placement_of(mine[name])
                whole.copy_(placement.full(mine[name]) if placement else mine[name].detach())
            if self.mesh.pp.size > 1:
                broadcast(whole, self.mesh.pp, root=holder)
            yield name, whole


@dataclass(frozen=True)
class Fit:
    """A recipe that fits a model on a mesh. `check_fit` has checked it, so it is not checked again.

    Attributes
    ----------
    recipe : Recipe
    plan : Plan or None
        The plan of the pipeline, which names only what is computed; None without a pipeline.
    styles : mapping of str to Style
        How tensor parallelism splits each module, by the module's name; empty without tensor
        parallelism.
    """

    recipe: Recipe
    plan: Plan | None
    styles: Mapping[str, Style]


def check_fit(
    model: nn.Module, mesh: Mesh, recipe: Recipe, tensor_plan: TensorPlan | None = None
) -> Fit:
    """Find out whether a model, which may be on the device `meta`, can be spread over a mesh.
    Nothing is sent.

    Raises
    ------
    RecipeError
        If mesh, recipe and the model's number of layers do not fit together.
    ValueError, TypeError
        If tensor parallelism cannot split the model; see `check_plan`.
    """
    plan = recipe.check(mesh.layout, len(blocks_of(model)))
    if mesh.layout.cp > 1:
        try:
            check_context(model, mesh.layout.cp, recipe.cp_comm, recipe.cp_order, mesh.layout.tp)
        except ValueError as error:
            raise RecipeError(f"cp={mesh.layout.cp}: {error}") from None
    check_recipe_of_experts(model, mesh, recipe)
    return Fit(
        recipe,
        plan,
        check_plan(model, mesh.tp, tensor_plan, recipe.sequence) if mesh.layout.tp > 1 else {},
    )


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    recipe: Recipe | Fit,
    loss: Loss,
    carried: Callable[[Any], Tensor | Tensors] | None = None,
    tensor_plan: TensorPlan | None = None,
    costs: Sequence[float] | None = None,
    generator: torch.Generator | None = None,
) -> Parallel:
    """Spread a serial model over a mesh, in place. Collective.

    Parameters
    ----------
    model : nn.Module
        Built on every rank; all ranks get rank 0's values.
    recipe : Recipe or Fit
        A `Recipe` is checked first. A `Fit`, which `check_fit` has returned for this model and
        mesh, is not.
    loss : callable
        `loss(output, target)`, a scalar, summed over microbatches and over the data axis. With
        tensor parallelism it gets this rank's part of the logits: see
        `vocabulary_parallel_cross_entropy_sum`.
    carried : callable, optional
        Required for a pipeline: `carried(inputs)` is an empty tensor (it may be on `meta`) of the
        shape and dtype that goes from stage to stage for a microbatch with these inputs; see
        `Pipeline`.
    tensor_plan : optional
        See `parallelize_tensor`. With a `Recipe` only.
    costs : sequence of float, optional
        The cost of each layer, by which the pipeline is cut; by default all cost the same. See
        `balance`.
    generator : torch.Generator, optional
        Draws adapters; see `add_lora`.

    Raises
    ------
    RecipeError
        On every rank, before anything is sent, if mesh, recipe and model do not fit together.
    ValueError, TypeError, MismatchError
        As `parallelize_tensor` and `DataParallel`.
    """
    fit = recipe if isinstance(recipe, Fit) else check_fit(model, mesh, recipe, tensor_plan)
    layers = len(blocks_of(model))
    if fit.plan is not None and carried is None:
        raise RecipeError(
            "a pipeline has to know what goes from stage to stage: pass carried=, see Pipeline"
        )
    if fit.plan is not None and costs is not None and len(costs) != layers:
        raise RecipeError(
            f"costs= names {len(costs)} costs, but the model has {layers} layers: give one for each"
        )
    adapt(model, fit.recipe, generator)
    if mesh.world.size > 1:
        make_equal(model, mesh.world)
    if routed_in(model):
        parallelize_experts(model, mesh, fit.recipe.ep_comm, fit.recipe.ep_fp8)
    tied, stages = tied_names(model), {0: model}
    if mesh.layout.tp > 1:
        split_equal(model, mesh.tp, fit.styles, fit.recipe.sequence)
    if fit.plan is not None:
        stages = take_stages(
            model,
            balance(costs or [1.0] * layers, fit.plan.stages),
            fit.plan.stages_of(mesh.pp.rank),
        )
        ties = tie_stages(model, tied, mesh.pp)
        record_stages(model.parameters(), mesh.pp)
    for stage, module in stages.items():
        if fit.recipe.sequence and stage > 0:
            know_all_tokens(module, mesh.tp)
    if fit.recipe.fp8:
        to_fp8(model)
    replica = replicate(model, mesh, fit.recipe)
    for module in stages.values():
        recompute_blocks(module, fit.recipe.recompute)
        if mesh.layout.cp > 1:
            parallelize_context(module, mesh.cp, fit.recipe.cp_comm, fit.recipe.cp_order)
        if backend := fit.recipe.compile:
            compile_blocks(
                blocks_of(module),
                name_of(backend),
                None if fit.recipe.recompute == "none" else False,
            )
    if fit.plan is None or carried is None:
        return Parallel(model, mesh, fit.recipe, loss, replica)
    plan = with_communication(fit.plan, reduce=mesh.data.size > 1)
    # With ZeRO 3 a rank has one stage, and must call the replica: its forward gathers the
    # parameters.
    called = stages if replica.whole_parameters else dict.fromkeys(stages, replica.called)
    pipeline = Pipeline(
        called, mesh.pp, plan, loss, carried, ties, replica, fused=not fit.recipe.compile
    )
    return Parallel(model, mesh, fit.recipe, loss, replica, pipeline)

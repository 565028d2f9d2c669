"""A serial model, spread over a mesh: every strategy once, in one order.

    model
      │    adapters                             beside its layers
      │    equal values                         those of rank 0, on every rank
      │    expert parallelism                   leaves this rank's experts
      │ 1  tensor (and sequence) parallelism    leaves this rank's block of each matrix
      │ 2  pipeline                             leaves the layers of this rank's stages
      │    products in 8 bits                   of the layers that are left
      │ 3  data parallelism or ZeRO             reduces the gradients of what is left, or shards it
      │    autocast                             around the forward of each stage
      │ 4  recomputation                        of the layers that are left, segment by segment
      │    context parallelism                  lets their attention reach the tokens of other ranks
      │    compiling                            of each layer's forward
      │ 5  optimizer                            over what this rank updates: `Parallel.optimizer`
      ▼    sites                                an outer optimizer beside it
    Parallel.step(...)

The order follows the links: the axis that sends most often is cut first, and is innermost in the
mesh. Each step sees only what the step before has left. That is why they combine: ZeRO shards
blocks of layers as it would shard layers. (Narayanan et al. 2021, section 3; Llama 3, 2024, section
3.3.2.)

A new strategy is a folder (`strategy.py` says what it is asked), its options in `Recipe`, and a
line here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minidist.full.context.context_parallel import ContextParallelism
from minidist.full.data_axis import DataAxis, EqualValues
from minidist.full.expert.expert_parallel import ExpertParallelism
from minidist.full.layers.adapters import Adapters
from minidist.full.layers.autocast import Autocast
from minidist.full.layers.blocks import blocks_of
from minidist.full.layers.compiled import Compiling
from minidist.full.layers.float8 import Float8
from minidist.full.layers.recomputation import Recomputation
from minidist.full.mesh import Layout, Mesh
from minidist.full.model.moe.routed import routed_in
from minidist.full.pipeline.actions import Plan
from minidist.full.pipeline.communicate import with_communication
from minidist.full.pipeline.executor import Pipeline, Tensors
from minidist.full.pipeline.stage import PipelineParallelism
from minidist.full.placement import check_serial
from minidist.full.recipe import Recipe, RecipeError
from minidist.full.slow_wires.strategy import Sites
from minidist.full.strategy import Facts, Loss, Parallel, Strategy
from minidist.full.tensor.plan import TensorParallelism

PIPELINE = PipelineParallelism()

ORDER: tuple[Strategy, ...] = (
    Adapters(),
    EqualValues(),
    ExpertParallelism(),
    TensorParallelism(),
    PIPELINE,
    Float8(),
    DataAxis(),
    Sites(),
    Autocast(),
    Recomputation(),
    ContextParallelism(),
    Compiling(),
)
"""In which strategies are checked and applied."""


@dataclass(frozen=True)
class Fit:
    """A recipe that fits a model on a mesh. `check_fit` has checked it, so it is not checked again.

    Attributes
    ----------
    recipe : Recipe
        Settled: no number of it is left open.
    checked : mapping of Strategy
        The strategies that the run has, in their order, each with what its check has found out.
    """

    recipe: Recipe
    checked: Mapping[Strategy, Any]

    @property
    def plan(self) -> Plan | None:
        """The plan of the pipeline, which names only what is computed; None without a pipeline."""
        return self.checked.get(PIPELINE)

    def extend(self, model: nn.Module) -> None:
        """Add to a serial model the parameters that only strategies have."""
        for strategy in self.checked:
            strategy.extend(model, self.recipe)

    def shares(self, layout: Layout) -> dict[str, int]:
        """Return what each option asks to divide the tokens of a row; see `Strategy.shares`."""
        asked = [strategy.shares(self.recipe, layout) for strategy in self.checked]
        return {option: ranks for each in asked for option, ranks in each.items()}

    def words(self, mesh: Mesh) -> str:
        """Return how a line about the run names its strategies, the outermost axis first."""
        said = [strategy.words(self.recipe, mesh) for strategy in reversed(list(self.checked))]
        return " ".join(words for words in said if words) or "dp=1"


def check_recipe(
    recipe: Recipe, layout: Layout, facts: Facts, order: Sequence[Strategy] = ORDER
) -> None:
    """Find out whether options fit each other, a layout, and a model of which these facts are known.

    Raises
    ------
    RecipeError
        It says in one sentence what does not fit, and the fix.
    TypeError
        If the recipe has options of its own, and the order is the usual one.
    """
    if type(recipe) is not Recipe and order is ORDER:
        raise TypeError(
            "this recipe may ask for strategies that the usual order does not have: pass order=, "
            "with them"
        )
    for strategy in order:
        for fault in strategy.faults(recipe, layout, facts):
            raise RecipeError(fault)


def check_fit(
    model: nn.Module, mesh: Mesh, recipe: Recipe, order: Sequence[Strategy] = ORDER
) -> Fit:
    """Find out whether a model, which may be on the device `meta`, can be spread over a mesh.

    Nothing is sent.

    Raises
    ------
    RecipeError
        If mesh, recipe and model do not fit together.
    ValueError, TypeError
        If tensor parallelism cannot split the model; see `check_plan`.
    """
    routed = routed_in(model)
    experts = routed[0].config.experts if routed else 0
    facts = Facts(len(blocks_of(model)), experts, tuple(mesh.world.nodes))
    check_recipe(recipe, mesh.layout, facts, order)
    check_serial(model, "parallelize")
    settled = recipe.settled(mesh.layout)
    wanted = [each for each in order if each.wanted(settled, mesh.layout, facts)]
    return Fit(settled, {each: each.check(model, mesh, settled) for each in wanted})


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    recipe: Recipe | Fit,
    loss: Loss,
    carried: Callable[[Any], Tensor | Tensors] | None = None,
    *,
    generator: torch.Generator | None = None,
    order: Sequence[Strategy] = ORDER,
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
    generator : torch.Generator, optional
        Draws adapters; see `add_lora`.
    order : sequence of Strategy
        The strategies that a `Recipe` may ask for, and in which order they are applied.

    Raises
    ------
    RecipeError
        On every rank, before anything is sent, if mesh, recipe and model do not fit together.
    ValueError, TypeError, MismatchError
        As `parallelize_tensor` and `DataParallel`.

    Cost: one broadcast of the model over all ranks.
    """
    fit = recipe if isinstance(recipe, Fit) else check_fit(model, mesh, recipe, order)
    if fit.plan is not None and carried is None:
        raise RecipeError(
            "a pipeline has to know what goes from stage to stage: pass carried=, see Pipeline"
        )
    parallel = Parallel(model, mesh, fit.recipe, loss, generator)
    for strategy, checked in fit.checked.items():
        strategy.apply(parallel, checked)
        parallel.applied[strategy] = checked
    if fit.plan is not None and carried is not None:
        parallel.pipeline = run_stages(parallel, fit.plan, carried)
    return parallel


def run_stages(
    parallel: Parallel, checked: Plan, carried: Callable[[Any], Tensor | Tensors]
) -> Pipeline:
    """Return what runs the stages of a model to which all strategies were applied."""
    mesh, replica = parallel.mesh, parallel.replica
    called = parallel.stages
    if not replica.whole_parameters:
        # With ZeRO 3 a rank has one stage, and must call the replica: its forward gathers the
        # parameters.
        called = dict.fromkeys(called, replica.called)
    return Pipeline(
        called,
        mesh.pp,
        with_communication(checked, reduce=mesh.data.size > 1),
        parallel.loss,
        carried,
        parallel.ties,
        replica,
        fused=not parallel.recipe.compile,
    )

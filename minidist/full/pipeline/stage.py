"""Stages of a pipeline: a serial model cut between its layers, from outside.

    stage 0   embedding │ layers.0 │ layers.1 │
    stage 1             │ layers.2 │ layers.3 │
    stage 2                        │ layers.4 │ norm │ head

An identity replaces each module that a stage does not have. So the model's own forward runs, and
takes the output of the stage before in place of tokens. Parameters keep the names that they have in
the serial model.
"""

import copy
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

from torch import nn

from minidist.full.comm import Communicator
from minidist.full.ddp.replicas import copy_from_root
from minidist.full.layers.blocks import blocks_of
from minidist.full.mesh import Layout, Mesh
from minidist.full.pipeline.actions import Plan
from minidist.full.pipeline.check import check
from minidist.full.pipeline.offload.pauses import with_offload
from minidist.full.pipeline.schedules import NAMES, plan
from minidist.full.placement import Tie, record
from minidist.full.recipe import Recipe, RecipeError
from minidist.full.replica import Alone
from minidist.full.strategy import Facts, Parallel, Strategy
from minidist.full.tensor.sequence import know_all_tokens


class PipelineParallelism(Strategy):
    """Leaves the layers of this rank's stages."""

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """Options fit the schedule, and the schedule fits the layout and the layers."""
        own = recipe.own_plan
        if own is None and recipe.schedule not in NAMES:
            yield f"there is no schedule {recipe.schedule!r}: choose one of {', '.join(NAMES)}"
        if layout.pp > 1 and facts.layers < 1:
            yield (
                f"pp={layout.pp} cuts a model between the modules of its nn.ModuleList `layers`, "
                "and it has none: use pp=1, or a model that has embedding, layers, norm and head, "
                "as minidist.full.model.GPT has"
            )
        yield from self._faults_of_row(recipe, recipe.row(layout))
        if recipe.microbatches < 0:
            yield f"microbatches={recipe.microbatches}, but a step has at least 1"
        if own and recipe.microbatches not in (0, own.microbatches):
            yield (
                f"microbatches={recipe.microbatches}, but the plan has {own.microbatches} of its "
                "own: leave it out"
            )
        if recipe.chunks > 1 and (own or layout.pp == 1):
            yield f"chunks={recipe.chunks} is for a pipeline that is interleaved: leave it out"
        if own and own.ranks != layout.pp:
            yield f"the plan is for {own.ranks} ranks, but pp={layout.pp}: use pp={own.ranks}"
        # asked before planning, which takes a time for each
        stages = own.stages if own else layout.pp * recipe.settled(layout).chunks
        ends = 2 if recipe.light_ends else 0  # may have no layer
        if layout.pp > 1 and stages > facts.layers + ends:
            yield (
                f"{stages} stages need at least {f'{stages - ends}' if ends else 'as many'} layers, but "
                f"the model has {facts.layers}: use fewer ranks in the pipeline, or {stages - ends} layers"
            )
        yield from self._faults_of_offload(recipe, layout)
        if recipe.light_ends and layout.pp == 1:
            yield "light_ends is for a pipeline, and pp=1: leave it out"
        if recipe.light_ends and recipe.costs is not None:
            yield "light_ends says what the ends cost, and costs= what each layer does: leave one out"
        if recipe.costs is not None and len(recipe.costs) != facts.layers:
            yield (
                f"costs= names {len(recipe.costs)} costs, but the model has {facts.layers} layers: give "
                "one for each"
            )

    def _faults_of_row(self, recipe: Recipe, row: str) -> Iterator[str]:
        """Yield a sentence for each option that does not go with a row of `Recipe.supported`."""
        offered = Recipe.supported[row]
        if recipe.zero not in offered:
            stages = " or ".join(str(stage) for stage in offered if isinstance(stage, int))
            yield (
                f"ZeRO {recipe.zero} does not go with {row}: use ZeRO {stages}, or the schedule "
                "gpipe or 1f1b"
            )
        if recipe.fp8 and "fp8" not in offered:
            yield f"fp8=True does not go with {row}: use the schedule gpipe or 1f1b"

    def _faults_of_offload(self, recipe: Recipe, layout: Layout) -> Iterator[str]:
        """Yield a sentence for each reason for which weights cannot leave while their stage
        waits.
        """
        own = recipe.own_plan
        asked = f"offload_stages={recipe.offload_stages:g}"
        if recipe.offload_stages < 0:
            yield f"{asked}, but a copy takes no negative time"
        if own and own.offloads:
            if recipe.offload_stages:
                yield f"{asked}, but the plan has its OFF and FETCH already: leave it out"
            asked = "a plan with OFF and FETCH"
        elif not recipe.offload_stages:
            return
        stages = own.stages if own else layout.pp * recipe.settled(layout).chunks
        if layout.pp == 1 or stages == layout.pp:
            yield (
                f"{asked} is for ranks with several stages, of which all but one wait: use the "
                "schedule interleaved, zb1p, zb-v or dualpipe-v"
            )
        if recipe.zero:
            yield (
                f"{asked} does not go with ZeRO {recipe.zero}, which keeps weights of several stages "
                "in one buffer that cannot be freed in part: use ZeRO 0"
            )

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """The pipeline axis has several ranks."""
        return layout.pp > 1

    def words(self, recipe: Recipe, mesh: Mesh) -> str:
        """Name the schedule."""
        name = recipe.own_plan.name if recipe.own_plan else recipe.schedule
        return f"pp={mesh.pp.size} ({name}, {recipe.microbatches} microbatches)"

    def check(self, model: nn.Module, mesh: Mesh, recipe: Recipe) -> Plan:
        """Return the checked plan, which names only what is computed."""
        return plan_of(recipe, mesh.layout.pp)

    def apply(self, parallel: Parallel, checked: Plan) -> None:
        """Cut the model, and keep this rank's stages of it."""
        model, pp, recipe = parallel.model, parallel.mesh.pp, parallel.recipe
        tied = tied_names(model)
        layers = len(blocks_of(model))
        if recipe.light_ends:
            parts = with_light_ends(layers, checked.stages)
        else:
            parts = balance(recipe.costs or [1.0] * layers, checked.stages)
        parallel.stages = take_stages(model, parts, checked.stages_of(pp.rank))
        parallel.ties = tie_stages(model, tied, pp)
        parallel.replica = Alone(model)  # of what is left
        for parameter in model.parameters():
            record(parameter, stages=pp)
        for stage, module in parallel.stages.items():
            if recipe.sp and stage > 0:  # what comes to this stage has only some of the tokens
                know_all_tokens(module, parallel.mesh.tp)


def plan_of(recipe: Recipe, ranks: int) -> Plan:
    """Return the checked plan of a settled recipe.

    Raises
    ------
    RecipeError
        If there is no plan for these numbers of ranks and microbatches, if your own plan has a
        fault, or if no stage waits for long enough to let its weights leave.
    """
    try:
        if recipe.own_plan:
            check(recipe.own_plan)
            made = recipe.own_plan
        else:
            made = plan(str(recipe.schedule), ranks, recipe.microbatches, recipe.chunks)
        if not recipe.offload_stages:
            return made
        leaving = with_offload(made, recipe.offload_stages)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    if not leaving.offloads:
        raise RecipeError(
            f"offload_stages={recipe.offload_stages:g}, but no stage waits for as long as weights "
            "take to leave and to come back: use more chunks or more tokens in a microbatch, so "
            "that a copy takes fewer forwards, or leave it out"
        )
    return leaving


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Return the layers of each stage: neighbours, cut so that the most expensive stage is as cheap
    as possible.

    Parameters
    ----------
    costs : sequence of float
        What each layer costs, in any unit. With equal costs, stages differ by one layer at most.
    stages : int
        How many stages; each gets at least one layer.

    Raises
    ------
    ValueError
        If there are fewer layers than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(
            f"{len(costs)} layers cannot be cut into {stages} stages of at least one: use fewer "
            "stages"
        )

    @cache
    def best(first: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        """Return the largest cost of `left` stages from layer `first` on, the sum of their squares,
        and where they end.
        """
        if left == 1:
            return sum(costs[first:]), sum(costs[first:]) ** 2, (len(costs),)
        found = []
        for end in range(first + 1, len(costs) - left + 2):
            cost, (largest, squares, ends) = sum(costs[first:end]), best(end, left - 1)
            found.append((max(cost, largest), cost**2 + squares, (end, *ends)))
        return min(found)

    _, _, ends = best(0, stages)
    return [range(first, end) for first, end in pairwise((0, *ends))]


def with_light_ends(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage if the embedding and the head count as one each.

    (Llama 3: Grattafiori et al. 2024, section 3.3.2.)
    """
    parts = balance([1.0] * (layers + 2), stages)
    # Number 0 was the embedding, and the last one the head.
    return [range(max(0, part.start - 1), min(layers, part.stop - 1)) for part in parts]


def take_stages(
    model: nn.Module, parts: Sequence[range], mine: Sequence[int]
) -> dict[int, nn.Module]:
    """Leave in `model` only what this rank's stages need, and return the module of each stage.

    Parameters
    ----------
    model : nn.Module
        The serial model, which is changed. Its forward calls `embedding`, `layers`, `norm` and
        `head`, as our GPT's does. A rank with one stage computes with the model itself, and a rank
        with several stages with views that share its modules. If the first and the last stage share
        a parameter, each keeps a copy: see `tied_names`.
    parts : sequence of ranges
        The layers of every stage; see `balance`.
    mine : sequence of int
        Which stages are this rank's.

    Raises
    ------
    ValueError
        If the model has no `nn.ModuleList` called `layers`, or one of another length.
    """
    layers, needed = getattr(model, "layers", None), parts[-1].stop
    if not isinstance(layers, nn.ModuleList) or len(layers) != needed:
        found = (
            f"{len(layers)} of them"
            if isinstance(layers, nn.ModuleList)
            else "no nn.ModuleList of that name"
        )
        raise ValueError(
            f"{type(model).__name__} is to be cut into {needed} layers, but has {found}"
        )
    stages = {stage: _keep(_view(model), parts, [stage]) for stage in mine}
    _keep(model, parts, mine)
    return stages if len(mine) > 1 else {mine[0]: model}


def _view(model: nn.Module) -> nn.Module:
    """Return another module with the same parts, and with its own lists of hooks."""
    view = copy.copy(model)
    view._forward_pre_hooks = view._forward_pre_hooks.copy()
    view._forward_hooks = view._forward_hooks.copy()
    return view


def _keep(model: nn.Module, parts: Sequence[range], mine: Sequence[int]) -> nn.Module:
    """Keep the layers of these stages, under their numbers, and the ends of the model that are
    theirs.
    """
    layers = [layer for stage in mine for layer in parts[stage]]
    kept = nn.ModuleList()
    kept._modules = {str(index): model.get_submodule(f"layers.{index}") for index in layers}
    ends = {"embedding": 0, "norm": len(parts) - 1, "head": len(parts) - 1}  # of which stage
    gone = {name: nn.Identity() for name, stage in ends.items() if stage not in mine}
    model._modules = {**model._modules, "layers": kept, **gone}
    return model


def tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each parameter that has several. Call this before `take_stages`."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [tuple(several) for several in names.values() if len(several) > 1]


def tie_stages(
    model: nn.Module, names: Sequence[Sequence[str]], comm: Communicator
) -> list[nn.Parameter]:
    """Tie the parameters that other ranks of the pipeline have, too; return those that are trained.

    Collective.

    Parameters
    ----------
    model : nn.Module
        What this rank has of the serial model.
    names : sequence of sequences of str
        All names of each shared parameter; see `tied_names`.

    They get the values of the first stage, and a record (`Tie`), so that norms and checkpoints
    count each only once. The pipeline will sum their gradients. Call this before data parallelism
    is applied.

    Cost: a split for each shared parameter, and a broadcast of it among the ranks that have it.
    """
    tied = []
    mine = dict(model.named_parameters(remove_duplicate=False))
    for several in names:
        parameter = next((mine[name] for name in several if name in mine), None)
        sharing = comm.split(int(parameter is not None))
        if parameter is not None and sharing.size > 1:
            record(parameter, tie=Tie(several[0], sharing))
            copy_from_root(parameter, sharing)
            if parameter.requires_grad:  # zeros for a frozen one would have weight decay move it
                tied.append(parameter)
    return tied

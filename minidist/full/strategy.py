"""What a strategy is asked, and what strategies build together.

    class                 says of a strategy
    its options           what a user can ask for                               `options.py` of its folder
    Strategy.faults       which options do not fit each other, or the layout    asked of every strategy,
    Strategy.wanted       whether a run has it                                  about numbers alone; then
    Strategy.check        whether the model fits                                of those that the run has
    Strategy.extend       which parameters it adds to a serial model
    Strategy.apply        how the model is changed                              checks nothing
    Strategy.attach       what is put beside each optimizer: a `Companion`
    Strategy.after_step   what changes with each step, beside parameters
    Strategy.state        what a checkpoint keeps of that
    Strategy.undo         how the model is as it was

`apply.py` has the order in which strategies are applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from minidist.full.clip import clip_by_global_norm
from minidist.full.collectives import all_reduce, broadcast
from minidist.full.mesh import Layout, Mesh
from minidist.full.model.moe.balance import Load
from minidist.full.optimizer.elementwise import check_elementwise
from minidist.full.pipeline.executor import Pipeline
from minidist.full.placement import placement_of
from minidist.full.recipe import Recipe
from minidist.full.replica import Alone, Optimizer, Replica, no_loss

Loss = Callable[[Tensor, Any], Tensor]


class Facts(NamedTuple):
    """What options are checked against, of a model and of the ranks.

    Attributes
    ----------
    layers : int
        Modules in its list `layers`; 0: it has no such list.
    experts : int
        Experts of each router; 0: it has no experts.
    nodes : tuple
        The name of each rank's node; empty: nobody has asked.
    """

    layers: int
    experts: int = 0
    nodes: tuple[object, ...] = ()


class Companion(Protocol):
    """What a strategy puts beside an optimizer. It hears of each step, and has a state."""

    def beside(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return what is kept of a parameter that the optimizer updates, by its name in a
        checkpoint: of the parameter's shape, or one number. Nothing for another optimizer's.
        """

    def counts(self) -> dict[str, Tensor]:
        """Return the numbers that `beside` names for every parameter alike. A rank that updates
        none has them, too.
        """

    def begin(self) -> None:
        """Begin anew, from what the parameters are now."""

    def meets_next(self) -> bool:
        """Tell whether ranks that train apart meet after the next step."""

    def volume(self, before: int, after: int) -> float:
        """Return the bytes that this rank sends between two numbers of steps, by formula."""

    def held(self) -> dict[str, list[Tensor]]:
        """Return this rank's tensors by category, for `Account`."""


class Strategy:
    """One way to spread a model. Subclasses answer what differs."""

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """Yield a sentence for each option that does not fit the others, the layout, or the model.

        Only the first is taken: later questions may rely on the earlier ones.
        """
        yield from ()

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """Tell whether a run has this strategy. If it has not, nothing else is asked of it."""
        raise NotImplementedError

    def check(self, model: nn.Module, mesh: Mesh, recipe: Recipe) -> Any:
        """Find out whether a model, which may be on the device `meta`, fits. Sends nothing.

        What is returned is given to `apply`.

        Raises
        ------
        RecipeError, ValueError, TypeError
            If it does not.
        """
        return None

    def extend(
        self, model: nn.Module, recipe: Recipe, generator: torch.Generator | None = None
    ) -> None:
        """Add to a serial model, which may be on `meta`, parameters that only this strategy has."""

    def apply(self, parallel: Parallel, checked: Any) -> None:
        """Change `parallel.model`, or what is beside it.

        Collective. `checked` is what `check` has returned.
        """
        raise NotImplementedError

    def attach(self, parallel: Parallel, optimizer: torch.optim.Optimizer) -> None:
        """Put something beside an optimizer that was built: see `Parallel.companions`. Collective."""

    def shares(self, recipe: Recipe, layout: Layout) -> dict[str, int]:
        """Return which option shares the tokens of a row out, and the number that must divide
        them.
        """
        return {}

    def words(self, recipe: Recipe, mesh: Mesh) -> str:
        """Return how a line about the run names the strategy and its options; or nothing."""
        return ""

    def after_step(self, parallel: Parallel) -> None:
        """Change what a step changes beside parameters, after backward. Collective."""

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return what a model has learned by this strategy that is neither parameter nor buffer, by
        its name in a checkpoint.
        """
        return {}

    def undo(self, parallel: Parallel) -> None:
        """Let the model be as one rank would have it, as far as its parameters are here.

        Collective.
        """


@dataclass(eq=False)
class Parallel:
    """This rank's part of a model that is spread over a mesh, and how all ranks take a step
    together.

    Attributes
    ----------
    model : nn.Module
        The part of the serial model that this rank holds. Parameters keep their serial names.
    mesh, recipe, loss
        As given to `parallelize`; the recipe is settled.
    generator : torch.Generator or None
        Draws adapters.
    applied : dict of Strategy
        In the order in which they were applied, each with what its check has returned. (The
        strategies themselves have no state: ranks that are threads share them.)
    stages : dict of int to nn.Module
        This rank's stages of the pipeline, by number; the model, if there is none.
    ties : list of nn.Parameter
        Those that the first and the last stage share.
    replica : Replica
        The strategy over the data axis.
    pipeline : Pipeline or None
        None if the mesh has no pipeline.
    companions : list of Companion
        What strategies have put beside optimizers.
    norms : float
        Of a site's gradients, their sum since sites last agreed.
    load : Load or None
        How evenly the last step has loaded the experts of all ranks; None if the model has none.
    """

    model: nn.Module
    mesh: Mesh
    recipe: Recipe
    loss: Loss
    generator: torch.Generator | None = None
    applied: dict[Strategy, Any] = field(default_factory=dict)
    stages: dict[int, nn.Module] = field(init=False)
    ties: list[nn.Parameter] = field(default_factory=list)
    replica: Replica = field(init=False)
    pipeline: Pipeline | None = None
    companions: list[Companion] = field(default_factory=list)
    norms: float = 0.0
    load: Load | None = None

    def __post_init__(self) -> None:
        """Begin with one stage and no other copy."""
        self.stages, self.replica = {0: self.model}, Alone(self.model)

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
        """Run forward and backward of all microbatches.

        Return the sum of the losses that this rank has computed, in float64.

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
        run = self._accumulate if self.pipeline is None else self.pipeline.step
        total = run(inputs, targets, *arguments)
        for strategy in self.applied:
            strategy.after_step(self)
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
        called = self.pipeline.stages.values() if self.pipeline else [self.replica.called]
        modes = {module: module.training for stage in called for module in stage.modules()}
        try:
            for module in modes:
                module.training = False
            if self.pipeline is not None:
                return self.pipeline.evaluate(inputs, targets, *arguments)
            total = no_loss(next(self.model.parameters()).device)
            for x, target, *rest in zip(inputs, targets, *arguments, strict=True):
                total = total + self.loss(self.replica.called(x, *rest), target)
            return total
        finally:
            for module, training in modes.items():
                module.training = training

    def _accumulate(
        self, inputs: Sequence[Any], targets: Sequence[Any], *arguments: Sequence[Any]
    ) -> Tensor:
        """Run forward and backward of all microbatches without a pipeline.

        Return the sum of the losses.
        """
        if len(inputs) != (count := self.recipe.microbatches):
            raise ValueError(
                f"{len(inputs)} inputs, but the recipe has microbatches={count}: pass exactly "
                f"{count}"
            )
        total = no_loss(next(self.model.parameters()).device)
        called, comm = self.replica.called, self.mesh.world
        for number, (x, target, *rest) in enumerate(zip(inputs, targets, *arguments, strict=True)):
            # ZeRO 2 and 3 hold no whole gradients, so they reduce those of each microbatch.
            adds_up = self.replica.whole_gradients and number + 1 < len(inputs)
            with self.replica.no_sync() if adds_up else nullcontext():
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
        if any(placement_of(parameter).block for parameter in self.model.parameters()):
            check_elementwise(optimizer, elementwise)
        for strategy in self.applied:
            strategy.attach(self, optimizer)
        return optimizer

    def beside(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return what strategies keep of a parameter that this rank updates, beside its optimizer's
        state, by its name in a checkpoint.
        """
        kept = [companion.beside(parameter) for companion in self.companions]
        return {name: tensor for each in kept for name, tensor in each.items()}

    def agreed(self, answers: list[float], norm: Tensor, due: bool) -> tuple[list[float], Tensor]:
        """Return the sum of what all ranks have answered, if sites meet after the next step or
        something else is `due`; otherwise zeros: who asks has to ask again. 0 means that nobody has
        said yes.

        With it comes a number that is finite if each `norm` was, on every site, since they last
        agreed.
        """
        if self.mesh.dcn.size == 1:
            return answers, norm
        self.norms += float(norm)
        if not due and not any(companion.meets_next() for companion in self.companions):
            return [0.0] * len(answers), torch.zeros(())
        device = next(self.model.parameters()).device
        total = torch.tensor([*answers, self.norms], dtype=torch.float64, device=device)
        all_reduce(total, self.mesh.world)  # so that only outer steps are counted between sites
        self.norms = 0.0
        return total[:-1].tolist(), total[-1]

    def stepped(self) -> None:
        """Let parameters follow `replica.trained`, after something other than the optimizer has
        changed it. Collective.
        """
        self.replica.stepped()

    def clip(self, limit: float) -> Tensor:
        """Clip by the global norm over the mesh, and return it; see `clip_by_global_norm`.

        Collective.
        """
        return clip_by_global_norm(self.kept, limit, self.mesh.pp)

    def state(self) -> dict[str, Tensor]:
        """Return what this rank's part of the model has learned beside parameters and buffers."""
        return {
            name: tensor
            for strategy in self.applied
            for name, tensor in strategy.state(self.model).items()
        }

    def copy_state(self, whole: nn.Module) -> None:
        """Copy what all stages have learned beside parameters into a serial model. Collective."""
        wanted = {
            name: tensor
            for strategy in self.applied
            for name, tensor in strategy.state(whole).items()
        }
        mine = {name: tensor for name, tensor in self.state().items() if name in wanted}
        for part in self.mesh.pp.all_gather_object(mine):
            for name, tensor in part.items():
                wanted[name].copy_(tensor)

    def unwrap(self) -> None:
        """End training: undo each strategy, the last one first.

        Parameters that lie on other ranks stay there: see `whole_parameters`. Collective.
        """
        for strategy in reversed(self.applied):
            strategy.undo(self)

    def whole_parameters(self, names: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter of the serial model whole, on every rank, one by one; after
        `unwrap`. Collective.

        `names` are the `named_parameters` of the serial model, which may be on the device `meta`.

        Cost: for each parameter an all-gather along the tensor axis, and a broadcast along the
        pipeline axis.
        """
        mine = dict(self.model.named_parameters(remove_duplicate=False))
        holders = [set(held) for held in self.mesh.pp.all_gather_object(sorted(mine))]
        device = next(self.model.parameters()).device
        for name, like in names:
            holder = next(rank for rank, held in enumerate(holders) if name in held)
            whole = torch.empty(like.shape, dtype=like.dtype, device=device)
            if name in mine:
                placement = placement_of(mine[name]).block
                whole.copy_(placement.full(mine[name]) if placement else mine[name].detach())
            if self.mesh.pp.size > 1:
                broadcast(whole, self.mesh.pp, root=holder)
            yield name, whole

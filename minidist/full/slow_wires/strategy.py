"""Sites as a strategy: after the optimizer's own step an outer step, on what each rank updates."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from minidist.full.collectives import all_reduce
from minidist.full.mesh import Layout, Mesh
from minidist.full.model.moe.routed import routed_in
from minidist.full.placement import placement_of
from minidist.full.recipe import Recipe, RecipeError
from minidist.full.slow_wires.outer import Meetings, Outer, OuterStep, Whole
from minidist.full.strategy import Facts, Parallel, Strategy

Numbers: TypeAlias = dict[str, int]
"""The fragment to which each parameter of the serial model belongs, by its name."""


class Sites(Strategy):
    """Lets each site train alone, and meet the others every `local_steps` steps."""

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """Sites say when they meet; what they would learn apart and cannot average is refused."""
        steps = recipe.local_steps
        if layout.dcn > 1 and not steps:
            yield (
                f"dcn={layout.dcn} sites train apart and must know when to meet: say "
                f"local_steps=50, or let them be ranks of the data axis"
            )
        if steps and recipe.fragments > steps:
            yield (
                f"fragments={recipe.fragments} meet one after the other within "
                f"local_steps={steps}: use at most fragments={steps}"
            )
        if steps and recipe.outer_delay >= steps:
            yield (
                f"outer_delay={recipe.outer_delay} would let a fragment travel until it is due "
                f"again, after local_steps={steps}: use at most outer_delay={steps - 1}"
            )
        if recipe.fragments > 1 and recipe.lora:
            yield (
                f"fragments={recipe.fragments} are cut from the whole model, and lora="
                f"{recipe.lora} trains adapters alone: use fragments=1"
            )
        if layout.dcn > 1 and recipe.fp8:
            yield (
                f"fp8=True learns scales, which the dcn={layout.dcn} sites would learn apart: "
                "leave one of them out"
            )

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """One site alone has an outer optimizer, too: Lookahead."""
        return recipe.local_steps > 0

    def check(self, model: nn.Module, mesh: Mesh, recipe: Recipe) -> Numbers:
        """Cut the serial model into fragments of about one size: every layout has the same."""
        biased = any(layer.config.balance == "bias" for layer in routed_in(model))
        if biased and mesh.layout.dcn > 1:
            raise RecipeError(
                f"balance='bias' moves biases of routers, which the dcn={mesh.layout.dcn} sites "
                "would move apart: use balance='aux', or no sites"
            )
        named = list(model.named_parameters())
        whole = sum(parameter.numel() for _, parameter in named)
        numbers, before = {}, 0
        for name, parameter in named:
            middle = (before + parameter.numel() / 2) / whole
            numbers[name] = min(int(middle * recipe.fragments), recipe.fragments - 1)
            before += parameter.numel()
        return numbers

    def apply(self, parallel: Parallel, checked: Any) -> None:
        """Change nothing: all sites begin equal."""

    def words(self, recipe: Recipe, mesh: Mesh) -> str:
        """Say how often sites meet."""
        return f"dcn={mesh.dcn.size} (every {recipe.local_steps} steps)"

    def travels(self, recipe: Recipe) -> Callable[[torch.Tensor], OuterStep]:
        """Return what makes of a flat outer step what is sent."""
        return Whole

    def attach(self, parallel: Parallel, optimizer: torch.optim.Optimizer) -> None:
        """Put an outer optimizer beside one. Collective."""
        recipe, replica = parallel.recipe, parallel.replica
        numbers: Numbers = parallel.applied[self]
        names = {parameter: name for name, parameter in parallel.model.named_parameters()}
        fragment_of = {}
        for parameter in replica.parameters_to_reduce:
            piece, tie = replica.slice_of(parameter), placement_of(parameter).tie
            # adapters, which have no name in the serial model, are one fragment
            fragment_of[piece] = numbers.get(tie.name if tie else names[parameter], 0)
        meetings = Meetings(
            recipe.local_steps,
            recipe.outer_lr,
            recipe.outer_momentum,
            recipe.fragments,
            recipe.outer_delay,
            recipe.mixing,
            self.travels(recipe),
            recipe.chooses,
        )
        outer = Outer(optimizer, fragment_of, parallel.mesh.dcn, meetings)
        parallel.companions.append(outer)

        handle = optimizer.register_step_post_hook(lambda *_: outer.stepped())
        # Before the hook with which ZeRO gathers what was updated: otherwise it would do so twice.
        # (Torch has no argument for that here; where it has one, `prepend`, it does the same.)
        optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]

    @torch.no_grad()
    def undo(self, parallel: Parallel) -> None:
        """Let all sites have the mean of their parameters. Collective."""
        if parallel.mesh.dcn.size > 1:
            for parameter in parallel.replica.trained:
                all_reduce(parameter.data, parallel.mesh.dcn, "mean")
            parallel.replica.stepped()

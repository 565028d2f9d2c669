"""A pipeline that is never flushed: each forward uses the version of the weights that its plan says,
and each backward that of its forward.

    version 3     ┌ F7 ─ F8 ┐ ........ B7 ─ B8           kept until the last backward that needs it
    version 4     └─────────┘ F9 ... ................    the newest: what the optimizer updates

While a version is the newest, it *is* the parameters: a view of the same memory. An update of
weights that somebody still needs moves the parameters to new memory first, and leaves the old to
those; otherwise it writes in place. So a stage holds exactly as many copies as `most_versions`
counts. The optimizer's state has no versions: an update is made to the newest weights.

Cost: that of the executor of pipelines, and a copy of a stage's weights for an update of weights
that are needed. (Narayanan et al. 2019, PipeDream, section 3.3, "weight stashing".)
"""

from collections import Counter
from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from minidist.full.comm import Communicator
from minidist.full.pipeline.actions import Action, Plan
from minidist.full.pipeline.communicate import with_communication
from minidist.full.pipeline.executor import Pipeline, Tensors
from minidist.further.stale.plans import Versions, check_versions

Weights: TypeAlias = dict[str, Tensor]
"""One version of a stage's parameters, by name, each with a gradient of its own."""


class StalePipeline(Pipeline):
    """One rank's stages, which are updated while older microbatches are still under way.

    Parameters
    ----------
    stages, comm, loss, carried
        As for `Pipeline`.
    plan : Plan
        With updates, and without sends and receives: see `plans.py`.
    versions : Versions
        Which weights each forward uses.
    optimizers : mapping of int to Optimizer
        What updates each of this rank's stages.

    `step` runs the whole plan, all batches of it. Losses are summed: divide them by what one
    *batch* has.

    Raises
    ------
    ScheduleError
        If the plan has a fault, or a version is not there when it is used.
    ValueError
        As `Pipeline`.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        comm: Communicator,
        plan: Plan,
        versions: Versions,
        loss: Callable[[Tensor, Any], Tensor],
        carried: Callable[[Any], Tensor | Tensors],
        optimizers: Mapping[int, torch.optim.Optimizer],
    ) -> None:
        check_versions(plan, versions)
        # fused products would add to the gradients of the parameters, not of their versions
        super().__init__(stages, comm, with_communication(plan), loss, carried, fused=False)
        self.versions, self.optimizers = versions, dict(optimizers)
        self.kept: dict[int, dict[int, Weights]] = {}

    def step(
        self, inputs: Sequence[Any], targets: Sequence[Any], *arguments: Sequence[Any]
    ) -> Tensor:
        """Run the plan, with an update after each batch; return as `Pipeline.step`."""
        self.updates = Counter[int]()
        self.kept = {stage: {0: self._newest(stage)} for stage in self.stages}
        self.users = {stage: Counter(self.versions[stage]) for stage in self.stages}
        return super().step(inputs, targets, *arguments)

    def forward(self, action: Action, *arguments: Any) -> Any:
        """Run a stage on a microbatch, with the version of its weights that the plan says."""
        version = self.versions[action.stage][action.microbatch]
        weights = self.kept[action.stage][version]
        return functional_call(self.stages[action.stage], weights, arguments)

    @torch.no_grad()
    def update(self, action: Action) -> None:
        """Step the optimizer of a stage with the gradients of a batch, whatever their version."""
        stage, last = action.stage, action.microbatch
        kept, users = self.kept[stage], self.users[stage]
        used = self.versions[stage][last]
        users[used] -= self.plan.batch
        before = self.updates[stage]
        parameters = dict(self.stages[stage].named_parameters())
        for name, weight in kept[used].items():
            parameters[name].grad, weight.grad = weight.grad, None
        if users[before] > 0:  # the newest version so far
            for parameter in parameters.values():
                parameter.data = parameter.data.clone()
        self.optimizers[stage].step()
        self.optimizers[stage].zero_grad()
        self.updates[stage] += 1
        kept[before + 1] = self._newest(stage)
        for version in [
            version for version in kept if version <= before and not users[version] > 0
        ]:
            del kept[version]

    def _newest(self, stage: int) -> Weights:
        """Return the parameters as they are, on the same memory, with gradients of their own.

        (`detach` would share autograd's count of changes, too, which goes on when the parameters
        have moved to other memory.)
        """
        return {
            name: parameter.data.requires_grad_(parameter.requires_grad)
            for name, parameter in self.stages[stage].named_parameters()
        }

    def held(self) -> dict[str, list[Tensor]]:
        """Return all versions of this rank's weights, for `Account`."""
        versions = [weights for each in self.kept.values() for weights in each.values()]
        return {"parameters": [weight for weights in versions for weight in weights.values()]}

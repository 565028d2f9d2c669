"""The stages of a pipeline: the seconds of each for a microbatch, and what they wait for each other:
messages, and the bubble, by the package's own plans on a clock or in closed form.

(Narayanan et al. 2021, section 2.2; Qi et al. 2024.)
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from minidist.parallel.pipeline.schedules import plan as pipeline_plan
from minidist.parallel.pipeline.simulate import simulate
from minidist.plan.compute.layer import head
from minidist.plan.memory import Parts, parts_of
from minidist.plan.parts.layer import Pass, passes
from minidist.plan.run import Setup


class Stage(NamedTuple):
    """A stage and a microbatch: its layers, and the seconds of what stands before and after them.

    The passes are those of its mean layer, of which `leading` are dense ones before the experts.
    `ends` are the embedding, the head and the loss; `joined` the all-reduces along tp of those.
    """

    layers: float
    leading: float
    forward: Pass
    backward: Pass
    ends: float
    joined: float

    @property
    def seconds(self) -> float:
        """All seconds of a microbatch, forward and backward."""
        of_layer = self.forward.seconds + self.backward.seconds
        return self.layers * of_layer + self.ends + self.joined

    def parameters(self, run: Setup, tables: float) -> Parts:
        """Return the stage's parameters on a rank, and of tables, with the ranks that have the same."""
        return parts_of(run, self.layers, tables, self.leading)


def stages_of(run: Setup) -> list[Stage]:
    """Return the stages of a run, in order."""
    share = run.share
    embedding = share.streamed(4 * share.tokens * run.model.hidden)
    joining = run.network.all_reduce(run.entry, run.group("tp"))
    found = []
    for place, layers in enumerate(run.layers()):
        site = run.site(place)
        there = replace(run, machine=site) if run.machine.slower else run
        forward, backward = passes(there)
        leading = run.leading_layers(place)
        if leading:
            forward_leading, backward_leading = passes(there.leading)
            forward = mean_of(forward_leading, forward, leading / layers)
            backward = mean_of(backward_leading, backward, leading / layers)
        ends = joined = 0.0
        if place == 0:
            ends += embedding
            joined += joining
        if place == run.pp - 1:
            of_last = replace(share, device=site.device)
            ends += head(of_last, run.software.loss)
            joined += joining
        stage = Stage(
            layers=layers,
            leading=leading,
            forward=forward,
            backward=backward,
            ends=ends,
            joined=joined,
        )
        found.append(stage)
    return found


def mean_of(one: Pass, other: Pass, share: float) -> Pass:
    """Return the mean of two passes: a `share` of one, and the rest of the other."""
    kinds = {}
    for kind, seconds in one.kinds.items():
        kinds[kind] = share * seconds + (1 - share) * other.kinds[kind]
    return Pass(kinds, share * one.seconds + (1 - share) * other.seconds)


def between_stages(run: Setup) -> float:
    """Return the seconds in which a microbatch's activations go from a stage to the next."""
    sending = run.network.send(run.entry / run.tp, run.group("pp"))
    # each rank along tp has sent its part, so the receivers gather
    sending += run.network.gather(run.entry, run.group("tp"))
    if not run.machine.slower:
        return sending
    of_all_replicas = run.entry * run.dp * run.cp
    return max(sending, of_all_replicas / run.machine.thin)


def filling(run: Setup, stages: Sequence[Stage], sending: float) -> float:
    """Return the bubble in closed form: how long the slowest stage waits for the others in a
    step.
    """
    seconds = [stage.seconds for stage in stages]
    slowest = stages[seconds.index(max(seconds))]
    share = 1 / run.chunks
    if run.schedule in ("zb-1p", "zb1p", "zb-h1"):
        # F + I - W of F + I + W, where W is half of the backward's computing
        twice_weights = slowest.backward.kinds["computing"] * max(run.layers())
        share *= 1 - twice_weights / max(seconds)
    elif run.schedule.startswith(("zb-2p", "zb-h2", "zb-v")):
        share = 0.02
    others = sum(seconds) - max(seconds)
    return others * share + 2 * (run.pp - 1) * sending


def simulated(run: Setup, stages: Sequence[Stage], sending: float, waits: float) -> float:
    """Return the bubble from the schedule's plan on a clock.

    The steady part of a plan repeats itself, so a plan of four microbatches a rank is enough.
    """
    m = min(run.microbatches, 4 * run.pp)
    plan = pipeline_plan(run.schedule, run.pp, m, run.chunks)
    busy = []
    for stage in stages:
        busy.append(stage.seconds + waits)
    slowest = max(stages, key=lambda stage: stage.seconds)
    both = slowest.forward.seconds + slowest.backward.seconds
    share = slowest.forward.seconds / both
    forward: list[float] = []
    backward: list[float] = []
    half: list[float] = []
    for rank in plan.rank_of:
        # a rank's layers are dealt out to its stages of the plan
        seconds = busy[rank] * run.pp / plan.stages
        of_backward = (1 - share) * seconds
        forward.append(share * seconds)
        backward.append(of_backward)
        half.append(of_backward / 2)
    clock = simulate(
        plan,
        forward,
        backward,
        half,
        half,
        latency=sending,
    )
    return clock.length - m * max(busy)

"""The stages of a pipeline, and how long they wait for each other.

    rank 0   F0 F1 F2 .. .. B0 ..          a rank's time in a step = microbatches x its seconds + its bubble
    rank 1      F0 F1 F2 B0 ..

The bubble of the slowest rank is told in two ways: the package's own plan of the schedule on a
clock, and in closed form. Both know that stages differ, in layers and in what stands at the ends.

    1f1b, gpipe                       (p - 1)(F + B)
    interleaved, of v chunks          (p - 1)(F + B)/v
    zb-h1; zb1p; zb-v, dualpipe-v     (p - 1)(F + I - W), of one of the 1, v or 2 stages that a rank has

A V takes 2p microbatches until it is as short as that; with p it is (p - 1)(F + B) of one of its
two stages, and between the two linear. On the clock a V begins at its first rank and ends there, so
its ranks start one after the other, which the papers do not count. DualPipe-V, too, is that of the
package: a forward stands before a backward, not beside it. (Narayanan et al. 2021, section 2.2; Qi
et al. 2023, "Zero bubble pipeline parallelism"; DeepSeek-AI 2024, section 3.2.1.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from minidist.full.pipeline.schedules import V_SHAPED
from minidist.full.pipeline.schedules import plan as pipeline_plan
from minidist.full.pipeline.simulate import Course, course, simulate
from minidist.plan.memory import Parts, parts_of
from minidist.plan.run import Setup

# of the package; others are known in closed form alone
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb1p", *V_SHAPED)
SPLIT = ("zb-h1", "zb-1p", "zb1p", *V_SHAPED)  # they put weight gradients off
COURSES = 64  # plans that are kept: finalists often have the same one, and other costs
FORWARD_OF_HEAD = 1 / 3  # of three products; another third are weight gradients


class Pass(NamedTuple):
    """A layer and a microbatch, forward or backward: its seconds by kind, and its seconds in all.

    They are more than the sum of the kinds if the layer waits for parameters or for its host.
    """

    kinds: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Stage:
    """What a rank has of a pipeline, and a microbatch: its layers, and the seconds of what stands
    before and after them.

    The passes are those of its mean layer, of which `leading` are dense ones before the experts.
    `first` is the embedding, `last` the head and the loss; `joined` the all-reduces along tp of
    those.
    """

    layers: float
    leading: float
    forward: Pass
    backward: Pass
    first: float
    last: float
    joined: float

    @cached_property
    def seconds(self) -> float:
        """All seconds of a microbatch, forward and backward."""
        return self.of_layers + self.ends + self.joined

    def parameters(self, run: Setup, tables: float) -> Parts:
        """Return the stage's parameters on a rank, and of tables, with the ranks that have the same."""
        return parts_of(run, self.layers, tables, self.leading)

    @property
    def of_layers(self) -> float:
        """The seconds of its layers."""
        return self.layers * (self.forward.seconds + self.backward.seconds)

    @property
    def ends(self) -> float:
        """The seconds of embedding, head and loss."""
        return self.first + self.last

    @property
    def shares(self) -> tuple[float, float]:
        """Which shares of its layers' seconds are forward, and weight gradients: half of what
        backward computes.
        """
        both = self.forward.seconds + self.backward.seconds
        return self.forward.seconds / both, self.backward.kinds["computing"] / 2 / both


def filling(run: Setup, stages: Sequence[Stage], sending: float) -> float:
    """Return the bubble in closed form: how long the slowest rank waits for the others in a
    step.
    """
    seconds = [stage.seconds for stage in stages]
    slowest = stages[seconds.index(max(seconds))]
    share = 1 / run.stages_a_rank
    if run.schedule in SPLIT:
        # F + I - W of F + I + W
        weights = slowest.shares[1] * slowest.of_layers + slowest.last * FORWARD_OF_HEAD
        if run.schedule in V_SHAPED:
            # it takes 2p microbatches until weights fill all that they can
            weights *= min(1.0, run.microbatches / run.pp - 1)
        share *= 1 - 2 * weights / max(seconds)
    elif run.schedule.startswith(("zb-2p", "zb-h2")):
        share = 0.02
    others = sum(seconds) - max(seconds)
    return others * share + 2 * (run.pp - 1) * sending


def simulated(run: Setup, ranks: Sequence[Stage], sending: float, waits: float) -> float:
    """Return the bubble from the schedule's plan on a clock.

    The steady part of a plan repeats itself, so a plan of two microbatches a rank is enough.
    """
    m = clocked_microbatches(run)
    ready = course_of(run.schedule, run.pp, m, run.chunks)
    plan = ready.plan
    forward, inputs, weights = [], [], []
    for place, layers in enumerate(run.stages()):
        rank = ranks[plan.rank_of[place]]
        of_layers = rank.of_layers * layers / rank.layers if rank.layers else 0.0
        of_forward, of_weights = rank.shares
        ends = rank.first if place == 0 else 0.0
        if place == plan.stages - 1:
            ends += rank.last
        # What is not of layers or ends is spread evenly: messages, and all-reduces of the ends.
        aside = (rank.joined + waits) / run.stages_a_rank
        both = of_layers + ends + aside
        forward.append(of_forward * (of_layers + aside) + FORWARD_OF_HEAD * ends)
        weights.append(of_weights * of_layers + FORWARD_OF_HEAD * ends)
        inputs.append(both - forward[-1] - weights[-1])
    backward = [sum(halves) for halves in zip(inputs, weights, strict=True)]
    clock = simulate(ready, forward, backward, inputs, weights, latency=sending)
    return clock.length - m * max(stage.seconds + waits for stage in ranks)


@lru_cache(maxsize=COURSES)
def course_of(schedule: str, ranks: int, microbatches: int, chunks: int) -> Course:
    """Return a schedule's plan, ready for the clock."""
    return course(pipeline_plan(schedule, ranks, microbatches, chunks))


def clocked_microbatches(run: Setup) -> int:
    """Return how many microbatches of a plan are put on a clock."""
    return min(run.microbatches, 2 * run.pp)


def clocked_actions(run: Setup) -> int:
    """Return how many actions of a plan are put on a clock: F, and B or its halves."""
    if run.pp == 1:
        return 0
    kinds = 3 if run.schedule in SPLIT else 2
    return kinds * run.pp * run.stages_a_rank * clocked_microbatches(run)

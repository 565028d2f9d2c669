"""What replicas send each other in a step, and how much of it nothing hides.

(Rajbhandari et al. 2020, section 7.)
"""

from typing import NamedTuple

from minidist.plan.links import Group
from minidist.plan.memory import Parts, ends_parameters, parts_of, table_parameters
from minidist.plan.parts.layer import gather
from minidist.plan.run import Setup
from minidist.plan.stages import Stage


class Reduction(NamedTuple):
    """Seconds of a step's collectives along the data axes: those that nothing hides, those that
    `backward` hides, and how long that is.
    """

    exposed: float
    hideable: float
    backward: float


def reduction(run: Setup, stage: Stage) -> float:
    """Return the seconds that the data axes add to a step: collectives which no computing hides,
    and what the hidden ones take away from computing.
    """
    forward = stage.layers * stage.forward.seconds
    backward = stage.layers * stage.backward.seconds
    if run.zero == 3:
        exposed, hideable, behind = reduction_of_shards(run, stage, backward)
    elif run.zero:
        exposed, hideable, behind = reduction_to_shards(run, stage, forward, backward)
    else:
        exposed, hideable, behind = reduction_of_copies(run, stage, backward)
    hidden = 0.0
    if run.software.overlap:
        hidden = min(hideable, behind)
    slowed = hidden * run.known[run.software.stolen]
    return exposed + hideable - hidden + slowed


def reduction_of_copies(run: Setup, stage: Stage, backward: float) -> Reduction:
    """Return what plain data parallelism sends: all gradients.

    Those of the embedding come last, when nothing is left to hide behind.
    """
    parts = stage.parameters(run, ends_parameters(run))
    last = [(table_parameters(run), run.sharded)]
    exposed = all_reduce(run, last, run.gradients)
    hideable = all_reduce(run, parts, run.gradients) - exposed
    return Reduction(exposed, hideable, backward)


def reduction_to_shards(run: Setup, stage: Stage, forward: float, backward: float) -> Reduction:
    """Return what ZeRO 1 and 2 send: each rank receives the gradients of its shard, and the
    parameters of all others.
    """
    parts = stage.parameters(run, ends_parameters(run))
    last = [(table_parameters(run), run.sharded)]
    times = 1.0
    if run.zero == 2:
        times = run.microbatches / run.reductions
    exposed = gather(run, last, run.gradients)
    hideable = times * gather(run, parts, run.gradients) - exposed
    gathering = gather(run, parts, run.kept_width)
    if run.software.gathers_ahead:
        gathering = max(0.0, gathering - forward)
    return Reduction(exposed + gathering, hideable, times * backward)


def reduction_of_shards(run: Setup, stage: Stage, backward: float) -> Reduction:
    """Return what ZeRO 3 sends beside the gathers of `passes`.

    Nothing hides the first layer's parameters, which are gathered before anything is computed, or
    its gradients, which come last. If groups of ranks shard, their sums are all-reduced over the
    groups, for each microbatch.
    """
    ends = ends_parameters(run)
    shards = run.sharded.ranks
    first_layers = parts_of(run, run.microbatches, ends)
    last_layer = parts_of(run, 1, ends)
    exposed = gather(run, first_layers, run.kept_width)
    exposed += gather(run, last_layer, run.gradients)
    groups = Group(run.dp * run.cp // shards, run.tp * shards)
    own = []
    for count, same in stage.parameters(run, ends):
        own.append((count / same.ranks, groups))
    hideable = run.microbatches * all_reduce(run, own, run.gradients)
    return Reduction(exposed, hideable, run.microbatches * backward)


def all_reduce(run: Setup, parts: Parts, width: int) -> float:
    """Return the seconds that all-reduces of these parameters take, of `width` bytes each."""
    seconds = 0.0
    for count, same in parts:
        seconds += run.network.all_reduce(count * width, same)
    return seconds

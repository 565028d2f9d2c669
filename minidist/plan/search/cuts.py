"""How layers are dealt out to the stages of a pipeline, of which a rank has one or several.

    evenly                        if the stages divide the layers
    as the package deals          126 layers, 16 stages: 7 7 8 8 .. 8      stages differ by one layer
    as Llama 3 was dealt out      126 layers, 16 stages: 7 8 8 8 .. 7      embedding and head count as a layer each

The last one shortens the stage that has the head, which can take longer than a layer. With chunks
the first stage may have the embedding alone, and the last the head alone. (Llama 3: Grattafiori et
al. 2024, section 3.3.2.) Where two sites differ in speed, each layer goes to the stage that would be
done with it first.
"""

from dataclasses import replace

from minidist.plan.parts.layer import passes
from minidist.plan.run import Setup
from minidist.plan.step import stages_of


def cuts(run: Setup, head: float) -> list[Setup]:
    """Return a layout with each way to deal out its layers, the fastest first, if the head takes as
    long as `head` layers.

    The others may hold less where memory is short.
    """
    layers = run.model.layers
    stages = run.pp * run.stages_a_rank
    if run.machine.slower:
        return [replace(run, cut=by_speed(run))]
    if stages == 1:
        return [run]
    found = [replace(run, ends_less=True)]
    if layers >= stages:
        found.insert(0, run)
    return sorted(found, key=lambda each: longest(each, head))


def layers_of_head(run: Setup) -> float:
    """Return how many layers take as long as the head, whatever the schedule."""
    one_a_rank = replace(run, schedule="1f1b", chunks=1)
    last = stages_of(one_a_rank)[-1]
    of_layer = last.of_layers / last.layers
    return last.last / of_layer


def longest(run: Setup, head: float) -> float:
    """Return the layers of the rank that has most to do, of which the head counts as `head`."""
    layers = run.layers()
    with_head = layers[run.rank_of[-1]] + head
    return max(*layers, with_head)


def by_speed(run: Setup) -> tuple[int, ...]:
    """Return the layers of each stage where two sites have devices of different speed."""
    seconds = []
    for stage in range(run.pp):
        forward, backward = passes(replace(run, machine=run.site(stage)))
        seconds.append(forward.seconds + backward.seconds)
    counts = [0] * run.pp
    for _ in range(run.model.layers):
        done = [
            (count + 1) * each
            for count, each in zip(counts, seconds, strict=True)
        ]  # fmt: skip
        counts[done.index(min(done))] += 1
    return tuple(counts)

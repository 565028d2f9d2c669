"""The bubble of a pipeline: measured on the virtual clock it is the plan's, and too long a one has
a remedy.
"""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import minidist
from minidist.cli.summary import bubble, remedies
from minidist.full.comm import Communicator
from minidist.full.comm.threads_wire.cluster import Cluster
from minidist.full.pipeline import plan, simulate, with_communication
from minidist.full.pipeline.executor import Pipeline
from minidist.further import Recipe

RANKS, MICROBATCHES = 4, 8


class Slow(torch.autograd.Function):
    """Takes a second of the virtual clock forward, and two backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, seconds: float) -> Tensor:
        ctx.comm, ctx.seconds = comm, seconds
        comm.advance(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.comm.advance(2 * ctx.seconds)
        return gradients[0], None, None


class Stage(nn.Module):
    def __init__(self, comm: Communicator, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.comm, self.seconds = comm, seconds

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, Slow.apply(x * self.weight, self.comm, self.seconds))


def measured(schedule: str, chunks: int, slowest: float = 1.0) -> float:
    """Run a pipeline once on a cluster without latency; return the share of the time in which ranks
    were idle.
    """
    planned = with_communication(plan(schedule, RANKS, MICROBATCHES, chunks))

    def program(comm: Communicator) -> tuple[float, float]:
        seconds = [slowest if stage == 1 else 1.0 for stage in range(planned.stages)]
        stages = {
            stage: Stage(comm, seconds[stage] / chunks) for stage in planned.stages_of(comm.rank)
        }
        pipeline = Pipeline(
            stages, comm, planned, lambda y, _: y.sum(), lambda x: torch.empty(x.shape), fused=False
        )
        pipeline.step([torch.ones(1)] * MICROBATCHES, [None] * MICROBATCHES)
        return pipeline.busy, comm.clock()

    busy, ends = zip(*minidist.run(program, RANKS, cluster=Cluster.uniform(0.0, 1e30)), strict=True)
    return 1 - sum(busy) / (RANKS * max(ends))


@pytest.mark.parametrize(
    ("schedule", "chunks"), (("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
)
def test_what_is_measured_is_what_the_plan_says(schedule: str, chunks: int) -> None:
    assert measured(schedule, chunks) == pytest.approx(
        simulate(plan(schedule, RANKS, MICROBATCHES, chunks)).bubble
    )


def test_a_slow_stage_keeps_the_others_waiting() -> None:
    times = [1.0, 2.0, 1.0, 1.0]
    expected = simulate(
        plan("1f1b", RANKS, MICROBATCHES), forward=times, backward=[2 * each for each in times]
    ).bubble
    assert measured("1f1b", 1, slowest=2.0) == pytest.approx(expected) and expected > 0.4


def test_the_remedy_is_named_above_15_percent_and_not_below() -> None:
    def said(idle: float) -> list[tuple[str, str]]:
        planned = plan("1f1b", RANKS, MICROBATCHES)
        fit, layout = SimpleNamespace(plan=planned), SimpleNamespace(dp=2)
        trainer = SimpleNamespace(
            checked=SimpleNamespace(fit=fit),
            planned_bubble=simulate(planned).bubble,
            config=SimpleNamespace(data=SimpleNamespace(batch=64)),
            mesh=SimpleNamespace(layout=layout),
            model=SimpleNamespace(config=SimpleNamespace(layers=8)),
            recipe=Recipe(),
        )
        # the first step warms up
        history = [SimpleNamespace(bubble=0.9)] + 3 * [SimpleNamespace(bubble=idle)]
        return bubble(cast(Any, trainer), cast(Any, SimpleNamespace(history=history)))

    assert said(0.14) == [
        ("bubble of the pipeline", "14.0%; by its plan, with equal stages, 27.3%")
    ]
    warning, words = said(0.30)[1]
    assert warning.strip() == "WARNING: above 15%"
    assert words.startswith(
        "try --microbatches 16 (15.8%) or --microbatches 32 (8.6%) or --schedule interleaved"
    )
    assert "--schedule zb-h1 (" in words


def test_remedies_shorten_the_bubble() -> None:
    now = plan("interleaved", 2, 4, 2)
    found = remedies(now, layers=6, parts=8, recipe=Recipe())
    assert all(share < simulate(now).bubble for share in found.values())
    assert "--schedule interleaved --chunks 3" in found
    assert "--schedule interleaved --chunks 3" not in remedies(now, 5, 8, Recipe())


def test_a_remedy_goes_with_the_recipe() -> None:
    """8 bits put no weight gradients off, and ZeRO 2 reduces them in 1f1b and gpipe alone."""
    now = plan("1f1b", 2, 2)
    assert "--schedule zb-h1" in (every := remedies(now, 6, 8, Recipe(zero=1)))
    assert every.keys() - remedies(now, 6, 8, Recipe(fp8=True)).keys() == {"--schedule zb-h1"}
    assert list(remedies(now, 6, 8, Recipe(zero=2))) == ["--microbatches 4", "--microbatches 8"]

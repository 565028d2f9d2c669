"""Options that change what a run costs, and no number, or hardly one: on a mesh, as a recipe asks
for them, each is told from what is simpler by what is sent, or by what is done.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from layouts import SMALL, Case, adamw, one_step, spread

import minidist
from minidist.comm import Cluster, Communicator, Link
from minidist.mesh import Layout
from minidist.parallel import Recipe
from minidist.parallel.pipeline import plan
from minidist.parallel.pipeline.communicate import with_communication

NODES = Cluster(Link(1e-6, 1e9), Link(1e-5, 1e8), ranks_per_node=2)
DP2, DP4, PP2, CP2 = Layout(dp=2), Layout(dp=4), Layout(pp=2), Layout(cp=2)
MEET = {"local_steps": 1, "outer_momentum": 0.0}
MOE = replace(SMALL, experts=4, top_k=2)


def sent(case: Case) -> dict[str, int]:
    """Return the bytes and messages that all ranks together send in a training step."""

    def program(comm: Communicator) -> tuple[int, int]:
        parallel, traffic = spread(comm, case), comm.traffic
        optimizer = parallel.optimizer(adamw, [{"params": list(parallel.model.parameters())}])
        bytes, messages = traffic.bytes_sent, traffic.messages_sent
        one_step(parallel, case, 0)
        optimizer.step()
        return traffic.bytes_sent - bytes, traffic.messages_sent - messages

    bytes, messages = zip(*minidist.run(program, case.layout.size, cluster=NODES), strict=True)
    return {"bytes": sum(bytes), "messages": sum(messages)}


@pytest.mark.parametrize(
    ("layout", "simpler", "option", "counted", "most"),
    [
        (DP2, {}, {"compress": "int8"}, "bytes", 0.15),
        (DP2, {}, {"compress": "topk:0.01"}, "bytes", 0.03),
        (DP2, {"strategy": "naive"}, {}, "messages", 0.2),
        (DP4, {"strategy": "naive"}, {"strategy": "server"}, "messages", 0.8),
        (DP4, {"zero": 3}, {"zero": 3, "hsdp": 2}, "bytes", 0.9),
        (DP4, {"zero": 3}, {"zero": 3, "zeropp": True}, "bytes", 0.9),
        (CP2, {}, {"cp_comm": "ulysses"}, "bytes", 0.9),
        (Layout(dp=2, ep=2), {}, {"ep_fp8": True}, "bytes", 0.9),
        (Layout(dp=4, ep=4), {}, {"ep_comm": "hierarchical"}, "messages", 0.9),
        (Layout(dcn=2), MEET, MEET | {"outer_topk": 0.02}, "bytes", 0.3),
        (PP2, {"schedule": "interleaved"}, {"schedule": "1f1b"}, "messages", 1 / 3),
    ],
    ids=str,
)
def test_an_option_is_told_by_what_it_sends(
    layout: Layout, simpler: dict[str, Any], option: dict[str, Any], counted: str, most: float
) -> None:
    # untied, so that no gradients of an embedding go from stage to stage
    config = MOE if layout.ep > 1 else replace(SMALL, tied=False)
    case = Case(layout, config=config, batch=8)
    plain, asked = (
        sent(replace(case, recipe=Recipe(microbatches=4 if layout.pp > 1 else 1, **words)))[counted]
        for words in (simpler, option)
    )
    assert 0 < asked <= most * plain


@pytest.mark.parametrize("name, chunks", [("gpipe", 1), ("zb-h1", 1), ("zb1p", 2), ("zb-v", 2)])
def test_a_schedule_is_run_as_it_is_called(name: str, chunks: int) -> None:
    """Whose messages would tell nothing: what is put off, and for how long, is in the plan."""
    case = Case(PP2, Recipe(schedule=name, microbatches=4))

    def program(comm: Communicator) -> bool:
        pipeline = spread(comm, case).pipeline
        expected = with_communication(plan(name, 2, 4, chunks), reduce=False)
        return pipeline is not None and pipeline.plan.actions == expected.actions

    assert all(minidist.run(program, 2))

"""Options that change what a run costs, and no number, or hardly one: on a mesh, as a recipe asks
for them, each is told from what is simpler by what is sent, or by what is done.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from layouts import SMALL, Case, adamw, build, one_step, spread, worst
from test_parallelize import saved_bytes
from torch import Tensor, nn

import minidist
from minidist.full.comm import Cluster, Communicator, Link
from minidist.full.layers.blocks import blocks_of
from minidist.full.mesh import Layout
from minidist.full.model.moe.routed import routed_in
from minidist.full.pipeline import plan
from minidist.full.pipeline.communicate import with_communication
from minidist.full.pipeline.weight_gradients import Product
from minidist.full.tensor.styles import ColumnParallel, ParallelRegion, RowParallel, Style
from minidist.further import Recipe

NODES = Cluster(Link(1e-6, 1e9), Link(1e-5, 1e8), ranks_per_node=2)
DP2, DP4, PP2, CP2 = Layout(dp=2), Layout(dp=4), Layout(pp=2), Layout(cp=2)
MEET = {"local_steps": 1, "outer_momentum": 0.0}
ZEROPP = {"zero": 3, "zeropp": True}
MLPS: dict[str, Style] = {
    "layers.*.mlp": ParallelRegion(),
    "layers.*.mlp.gate": ColumnParallel(),
    "layers.*.mlp.up": ColumnParallel(),
    "layers.*.mlp.down": RowParallel(),
    "head": ColumnParallel(),
}
MOE = replace(SMALL, experts=4, top_k=2)


def sent(case: Case) -> dict[str, int]:
    """Return the bytes and messages that all ranks together send in a training step."""

    def program(comm: Communicator) -> tuple[int, int]:
        parallel, traffic = spread(comm, case), comm.traffic
        optimizer = parallel.optimizer(adamw, [{"params": list(parallel.model.parameters())}])
        bytes, messages = traffic.bytes, traffic.messages
        one_step(parallel, case, 0)
        optimizer.step()
        return traffic.bytes - bytes, traffic.messages - messages

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
        (DP4, {"zero": 3}, ZEROPP, "bytes", 0.9),
        (DP4, ZEROPP, ZEROPP | {"node_ranks": 1}, "bytes", 0.3),
        (Layout(tp=2), {}, {"tensor_plan": MLPS}, "bytes", 0.6),
        (CP2, {}, {"cp_comm": "ulysses"}, "bytes", 0.9),
        (CP2, {}, {"cp_comm": "all_gather"}, "messages", 0.8),
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


@pytest.mark.parametrize(
    "name, chunks",
    [
        ("gpipe", 1),
        ("zb-h1", 1),
        ("zb1p", 2),
        ("zb1p", 3),
        ("interleaved", 3),
        ("zb-v", 2),
        ("dualpipe-v", 2),
    ],
)
def test_a_schedule_is_run_as_it_is_called(name: str, chunks: int) -> None:
    """Whose messages would tell nothing: what is put off, and for how long, is in the plan."""
    recipe = Recipe(schedule=name, microbatches=4, chunks=chunks if chunks > 2 else 0)
    case = Case(PP2, recipe, replace(SMALL, layers=6))

    def program(comm: Communicator) -> bool:
        pipeline = spread(comm, case).pipeline
        expected = with_communication(plan(name, 2, 4, chunks), reduce=False)
        return pipeline is not None and pipeline.plan.actions == expected.actions

    assert all(minidist.run(program, 2))


def test_a_plan_of_ones_own_gives_the_serial_numbers() -> None:
    config = replace(SMALL, tied=False)
    assert worst(Case(Layout(tp=2), Recipe(tensor_plan=MLPS), config)) <= 1e-9


@pytest.mark.parametrize("zero", (0, 1, 2, 3))
def test_a_model_is_made_equal_once(zero: int) -> None:
    """By the mesh, so that the strategy over the data axis broadcasts nothing again."""

    def program(comm: Communicator) -> int:
        spread(comm, Case(DP2, Recipe(zero=zero)))
        return comm.traffic.bytes

    whole = sum(each.nbytes for each in build(SMALL, 0, torch.float64).parameters())
    assert minidist.run(program, 2) == [whole, 0]


def test_layers_are_dealt_out_by_what_they_cost() -> None:
    def program(comm: Communicator, costs: tuple[float, ...] | None) -> int:
        return len(blocks_of(spread(comm, Case(PP2, Recipe(microbatches=2), costs=costs)).model))

    assert minidist.run(partial(program, costs=None), 2) == [2, 2]
    assert minidist.run(partial(program, costs=(3, 1, 1, 1)), 2) == [1, 3]


@pytest.mark.parametrize("schedule", ("1f1b", "zb-h1"))
def test_a_pipeline_adds_gradients_up_by_the_product_itself(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each microbatch but the first, which finds no gradient to add to; also put off."""
    plain, added = Product.add_to, Counter[int]()

    def counted(product: Product, total: Tensor) -> None:
        added[id(product.weight)] += 1
        plain(product, total)

    monkeypatch.setattr(Product, "add_to", counted)

    def program(comm: Communicator) -> None:
        recipe = Recipe(schedule=schedule, microbatches=4)
        case = Case(PP2, recipe, replace(SMALL, tied=False), batch=8)
        parallel = spread(comm, case)
        one_step(parallel, case, 0)
        for module in parallel.model.modules():
            if isinstance(module, nn.Linear) and module.weight.requires_grad:
                assert added[id(module.weight)] == 3

    minidist.run(program, 2)


@pytest.mark.parametrize(("zero", "times"), ((0, 1), (1, 1), (2, 5 / 2)))
def test_gradients_of_all_microbatches_travel_together_but_under_zero_2(
    zero: int, times: float
) -> None:
    """ZeRO 2 holds no whole gradients: four microbatches are reduced, and parameters are gathered
    once, in place of one of each.
    """
    case = Case(DP2, Recipe(zero=zero), batch=8)
    found = sent(replace(case, recipe=Recipe(zero=zero, microbatches=4)))
    assert found == {what: times * count for what, count in sent(case).items()}


def test_experts_are_called_once_for_all_senders() -> None:
    def program(comm: Communicator) -> int:
        case = Case(Layout(dp=4, ep=4), Recipe(), MOE, batch=8)
        parallel, calls = spread(comm, case), []
        for layer in routed_in(parallel.model):
            layer.experts.register_forward_pre_hook(lambda *_: calls.append(1))
        one_step(parallel, case, 0)
        return len(calls)

    assert minidist.run(program, 4) == [MOE.layers] * 4


@pytest.mark.parametrize(
    ("policy", "inputs"), [("full", 4), ("every 2", 2), ("sqrt", 2), ("every 3", 2), ("every 9", 1)]
)
def test_a_segment_keeps_its_input_and_no_other(policy: str, inputs: int) -> None:
    """Whatever the segments, backward calls each layer once more: the bytes that are kept differ."""
    case = Case(DP2, batch=8)
    one = 4 * SMALL.sequence * SMALL.hidden * 8

    def kept(policy: str) -> list[int]:
        recipe = Recipe(recompute=policy)
        return minidist.run(lambda comm: saved_bytes(comm, replace(case, recipe=recipe)), 2)

    for ours, least in zip(kept(policy), kept("every 4"), strict=True):
        assert ours - least == (inputs - 1) * one

"""Each cell of the planner's tables of machines, precisions and software, and what experts cost on
them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest

from minidist.cli.plan.runnable import command
from minidist.plan.compute.products import PRECISIONS, Share, check_precision, speed
from minidist.plan.cost import NOTICED, job_of
from minidist.plan.device import Constants, Device, PlanError, machine, table
from minidist.plan.links import Group
from minidist.plan.model import Model, Product, model
from minidist.plan.parts.layer import across_nodes, experts
from minidist.plan.run import Setup, Software
from minidist.plan.search import Found
from minidist.plan.step import step

KNOWN = Constants.table()
# Experts of a rank, rows of each, outputs and inputs; then the share of 2,250 TFLOP/s that a B200
# reached in the product, and in those of the gradients of its inputs and of its weights (SimuMax
# 2026, configs/system/b200_bf16_ceperm.json).
MEASURED = (
    (160, 154, 3072, 5120, 0.1997, 0.1947, 0.0937),
    (256, 128, 4096, 7168, 0.2081, 0.2264, 0.0775),
    (80, 308, 3072, 5120, 0.3868, 0.3044, 0.1616),
    (128, 256, 4096, 7168, 0.2714, 0.3325, 0.1473),
    (40, 616, 3072, 5120, 0.4618, 0.3213, 0.2579),
    (64, 512, 4096, 7168, 0.3670, 0.4046, 0.2192),
    (20, 1232, 3072, 5120, 0.5134, 0.4215, 0.3276),
    (160, 154, 5120, 1536, 0.1158, 0.1228, 0.0828),
    (256, 128, 7168, 2048, 0.1782, 0.1513, 0.0801),
    (80, 308, 5120, 1536, 0.2350, 0.2495, 0.1780),
    (64, 512, 7168, 2048, 0.4274, 0.2942, 0.2145),
)


def run_on(cluster: str, **how: object) -> Setup:
    """Return a run of a small mixture on two nodes of a cluster."""
    node = table("clusters")[cluster]["node"]
    where = machine(f"{cluster}:{2 * node}")
    start = Setup(model("qwen3-30b-a3b"), where, 4096, 2 * node, dp=2 * node, ep=4)
    return replace(start, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("cluster", table("clusters"))
def test_every_cluster_takes_every_precision_that_it_has(cluster: str) -> None:
    """Fewer bits are never slower, and a precision that a device has not got is refused."""
    device = machine(f"{cluster}:1").device
    wide = step(run_on(cluster))["computing"]
    for precision in PRECISIONS[1:]:
        if speed_or_refusal(device, precision):
            narrow = step(run_on(cluster, precision=precision))["computing"]
            assert 0 < narrow < 1.1 * wide, precision


def test_a_rack_is_a_node_of_several_hosts() -> None:
    """Each writes its share of a checkpoint, and Slurm and the memory of a host know only them."""
    layout = Setup(model("llama-8b"), machine("gb200:144"), 4096, 144, dp=144, zero=1)
    lines = {}
    for gpus in (144, 71):
        run = replace(layout, machine=machine(f"gb200:{gpus}"), dp=gpus, batch=gpus)
        lines[gpus] = command(run)[0]
    assert lines == {
        144: "#SBATCH --nodes=36 --ntasks-per-node=4 --gpus-per-node=4",
        71: "#SBATCH --nodes=18 --ntasks=71 --ntasks-per-node=4 --gpus-per-node=4",
    }
    trays, nodes = (
        replace(layout, machine=machine(name), dp=64) for name in ("gb200:64", "b200:128")
    )
    written = [job_of(Found(run, {"computing": 1.0}, {})).write for run in (trays, nodes)]
    assert written[0] == pytest.approx(written[1])  # sixteen hosts each


def test_a_peer_sends_on_its_own_cards() -> None:
    """A replica of eight ranks has all cards of a node, one of a single rank one of them."""
    layout = Setup(model("llama-8b"), machine("h100:64"), 4096, 64, tp=8, dp=8)
    whole, one = (
        Found(run, {"computing": 1.0}, {}) for run in (layout, replace(layout, tp=1, dp=64))
    )
    state = layout.model.parameters * 14
    assert job_of(whole).stall == pytest.approx(NOTICED + state / 400e9)
    assert job_of(one).stall == pytest.approx(NOTICED + state / 50e9)


def speed_or_refusal(device: Device, precision: str) -> bool:
    """Tell whether a device has a precision; if not, it has to be refused."""
    has = device.peak4 > 0 if precision == "nvfp4" else device.peak8 > device.peak
    if has:
        check_precision(precision, device)
        assert speed(device, KNOWN, precision) > 0
    else:
        with pytest.raises(PlanError, match=rf"{device.name} multiplies no faster in [48] bits"):
            check_precision(precision, device)
    return has


@pytest.mark.parametrize("name", table("software"))
def test_every_software_times_a_mixture(name: str) -> None:
    seconds = step(run_on("h100", software=Software.named(name)))
    assert all(each > -1e-12 for each in seconds.values()) and seconds["expert"] > 0


def test_grouped_products_are_near_the_measured_ones() -> None:
    """15 % off on average. Counted as one product, which hides its bytes, they are far too fast."""
    share = Share(
        Device.named("b200"), KNOWN, Model(1, 64, 1, 64), "flash", 1, 64, 1, 1, 1, True, "bf16"
    )
    grouped, alone = [], []
    for groups, rows, outputs, inputs, *shares in MEASURED:
        forward = Product(rows, outputs, inputs)
        back = Product(rows, inputs, outputs), Product(inputs, outputs, rows)
        took = sum(2 * groups * rows * outputs * inputs / (2250e12 * each) for each in shares)
        widths = zip((forward, *back), (2, 2, 8), strict=True)
        told = sum(share.grouped(each, groups, "bf16", width) for each, width in widths)
        grouped.append(abs(told / took - 1))
        alone.append(sum(share.product(each, groups) for each in (forward, *back)) / took - 1)
    assert fmean(grouped) < 0.16 and max(grouped) < 0.27
    assert fmean(alone) < -0.25


@pytest.mark.parametrize(("nodes", "top_k"), ((2, 8), (8, 8), (8, 1), (4, 4)))
def test_a_token_crosses_to_each_node_once(nodes: int, top_k: int) -> None:
    """Counted on tokens that draw their experts, beside what the exchange sends across."""
    run = run_on("h100", known=KNOWN.but(tree=0.0))
    run = replace(run, model=replace(run.model, top_k=top_k))
    generator = random.Random(0)
    crossed = 0
    for _ in range(20_000):
        reached = {generator.randrange(nodes) for _ in range(top_k)}
        crossed += len(reached - {0})  # of a token that is on node 0
    tokens = 1e9
    inside = run.network.exchange(tokens * top_k, Group(8))
    across = crossed / 20_000 * tokens / run.network.card()
    assert across_nodes(run, tokens, 8, nodes) == pytest.approx(max(across, inside), rel=0.02)


def test_one_expert_is_a_product_as_any_other() -> None:
    """AMD's products of several experts in one kernel are slower."""
    share = run_on("mi300x").share
    alone = Product(4096, 4096, 2048)
    assert share.grouped(alone, 1, "bf16", 2) == share.product(alone)
    assert share.grouped(alone, 2, "bf16", 2) > 2 * 1.5 * share.product(alone)


def test_experts_of_a_few_groups_are_on_few_nodes() -> None:
    """DeepSeek-V3's: at most 4 of 8 groups, which are on as many nodes, or on fewer with fewer nodes."""
    free = run_on("h100", model=replace(model("deepseek-v3"), groups=0, top_groups=0))
    bound = replace(free, model=model("deepseek-v3"))
    tokens, level = 1e9, free.known["tree"]
    per_node = tokens / free.network.card()
    took = [across_nodes(bound, tokens, 1, nodes) - level for nodes in (8, 2)]
    assert took == pytest.approx([4 * (7 / 8) * per_node, 1 * (1 / 2) * per_node])
    assert across_nodes(free, tokens, 1, 8) > took[0] * 1.3
    with pytest.raises(PlanError, match="top_groups=9 of groups=8: give at most as many"):
        replace(model("deepseek-v3"), top_groups=9)


def test_experts_of_ranks_along_tp_stay_where_their_node_is() -> None:
    """tp 2 and ep 4 are eight ranks, a node of H100: nothing crosses the network."""
    run = run_on("h100", tp=2, dp=8, sp=True, known=KNOWN.but(host_experts=0.0))
    slower = replace(run, machine=replace(run.machine, across=run.machine.across / 100))
    assert experts(run) == experts(slower) > 0
    assert experts(replace(slower, ep=8)) > 2 * experts(replace(run, ep=8))

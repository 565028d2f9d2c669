"""The book's budget and the planner, which knows more: how far apart they are, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minidist.budget import Layout
from minidist.budget import bytes_held as book_bytes
from minidist.budget import step_seconds as book_step
from minidist.model import GPTConfig
from minidist.plan.device import machine
from minidist.plan.memory import bytes_held
from minidist.plan.model import model
from minidist.plan.run import Setup
from minidist.plan.search import search
from minidist.plan.step import step


def config_of(run: Setup) -> GPTConfig:
    """Return the book's model; an MLP without a gate has two matrices of 3, so they are longer."""
    of = run.model
    return GPTConfig(
        vocabulary=of.vocabulary,
        layers=of.layers,
        hidden=of.hidden,
        heads=of.heads,
        key_value_heads=of.kv or of.heads,
        intermediate=of.ffn if of.gated else 2 * (of.ffn or 4 * of.hidden) // 3,
        sequence=run.sequence,
        tied=of.tied,
    )


def layout_of(run: Setup) -> Layout:
    return Layout(
        dp=run.dp,
        pp=run.pp,
        tp=run.tp,
        zero=run.zero,
        sp=run.sp,
        batch=run.dp * run.microbatches * run.microbatch,
        microbatches=run.microbatches,
        recompute=run.recompute == "full",
    )


def seconds_of(run: Setup, rate: float) -> dict[str, float]:
    site = run.machine
    inside, across = site.device.link, site.across / site.node
    return book_step(config_of(run), layout_of(run), rate, inside, across)


def bytes_of(run: Setup) -> dict[str, float]:
    return book_bytes(config_of(run), layout_of(run))


RUN = Setup(model("llama-70b"), machine("h100:64"), 4096, 1024, sp=True, fused_loss=True)
GPT = replace(RUN, model=model("gpt3-175b"), gradient_bytes=2)
RUNS = [
    replace(RUN, tp=4, pp=4, dp=4, zero=1),
    replace(RUN, tp=4, pp=2, dp=8, zero=1),
    replace(RUN, tp=8, pp=2, dp=4, zero=1, recompute="full"),
    replace(RUN, tp=2, pp=8, dp=4, zero=1, microbatch=2, recompute="full"),
    replace(RUN, tp=8, pp=2, dp=64, zero=1, machine=machine("h100:1024")),
    replace(GPT, tp=8, pp=8, dp=1),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"tp={run.tp} pp={run.pp} dp={run.dp}")
def test_a_step_is_near_the_planners(run: Setup) -> None:
    """With 0.6 of the peak for every product: within 7 % on the whole, computing within 7, tensor
    and bubble within 10.

    The planner knows what this page does not: narrow products are slower (tp = 8), element-wise
    work and attention have speeds of their own, the loss makes the last stage the slowest, and what
    hides still takes a fifth of its time from computing. So this page is a little too fast, or at
    most 1 % too slow. Latencies, which this page leaves out, are left out of both.
    """
    at_once = replace(run, known=run.known.but(near_hop=0.0, tree=0.0, hop=0.0))
    found, planned = seconds_of(run, 0.6 * run.machine.device.peak), step(at_once)
    assert sum(found.values()) == pytest.approx(sum(planned.values()), rel=0.07)
    assert sum(found.values()) < 1.01 * sum(planned.values())
    assert found["computing"] == pytest.approx(planned["computing"], rel=0.07)
    assert found["tensor"] == pytest.approx(planned["tensor"], rel=0.1)
    assert found["bubble"] == pytest.approx(planned["bubble"], rel=0.1)
    assert abs(found["data"] - planned["data"]) < 0.05 * sum(planned.values())


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"tp={run.tp} pp={run.pp} dp={run.dp}")
def test_bytes_are_near_the_planners(run: Setup) -> None:
    """States within 10 %, activations within 17 % for a Llama (28,672 channels are more than 8/3 h)
    and 3 for a GPT.

    The planner puts the whole embedding on the first stage, and keeps gradients in 32 bits unless
    told otherwise. Of Transformer Engine's kernels it counts what these keep; here, what the papers
    say, as this page does.
    """
    of_papers = replace(
        run.model, dropout=not run.model.gated
    )  # whose masks a GPT's 34 bytes count
    run = replace(run, model=of_papers, gradient_bytes=2)
    run = replace(run, software=replace(run.software, engine=False))
    found, planned = bytes_of(run), bytes_held(run)
    for name in ("parameters", "gradients", "optimizer"):
        assert found[name] == pytest.approx(planned[name], rel=0.1), name
    assert found["activations"] == pytest.approx(
        planned["activations"], rel=0.17 if run.model.gated else 0.03
    )


def test_bytes_are_near_the_planners_without_sequence_parallelism() -> None:
    """What stands between the matrices is then whole on each of the ranks that share them."""
    whole, cut = (bytes_held(replace(RUNS[1], sp=sp))["activations"] for sp in (False, True))
    assert (
        whole == pytest.approx(bytes_of(replace(RUNS[1], sp=False))["activations"], rel=0.17)
        and whole > 1.5 * cut
    )


def test_the_budget_chooses_nearly_as_well() -> None:
    """Of the planner's hundred best layouts, the fastest by this page is within 5 % of the best.

    Latencies, and embedding and head that count as layers, which this page leaves out, are left out
    of both.
    """
    fixed = {"cp": 1, "ep": 1, "offload": False, "schedule": "1f1b", "zero": 1}
    at_once = RUN.known.but(near_hop=0.0, tree=0.0, hop=0.0)
    answer = search(replace(RUN, sp=False, known=at_once), fixed)
    some = [each for each in answer.found if not each.run.ends_less][:100]
    fastest = min(some, key=lambda each: sum(seconds_of(each.run, 0.6 * 989e12).values()))
    assert fastest.seconds < 1.05 * some[0].seconds

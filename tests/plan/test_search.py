"""The search: how layers, gradients and batches are dealt out, and that the answer says what was
found.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, pairwise, product

import pytest

from minidist.cli.plan.command import main
from minidist.full.pipeline import Plan, plan
from minidist.full.pipeline.actions import Kind
from minidist.full.pipeline.schedules import V_SHAPED
from minidist.full.pipeline.stage import balance, with_light_ends
from minidist.plan.device import Device, PlanError, machine
from minidist.plan.memory import GB, bytes_held, in_flight
from minidist.plan.memory.peak import bytes_of_stage
from minidist.plan.model import Model, model
from minidist.plan.run import Setup, Software
from minidist.plan.search import RESERVE, search
from minidist.plan.search.fitting import fitting
from minidist.plan.search.layouts import misfit
from minidist.plan.step import passes_of, stages_of, step
from minidist.plan.traffic import bytes_sent

RUN = Setup(model("llama-70b"), machine("h100:64"), 4096, 1024, fused_loss=True)
SMALL = Model(14, 1024, 16, 32000, kv=8, ffn=2816)
SCHEDULES = [("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 1), ("dualpipe-v", 1)]


def on_pipeline(schedule: str, chunks: int, **change: object) -> Setup:
    """Return a run of 14 layers on 4 stages, which do not divide them."""
    run = replace(RUN, model=SMALL, machine=machine("h100:8"), pp=4, dp=2, batch=64)
    return replace(run, schedule=schedule, chunks=chunks, **change)  # type: ignore[arg-type]


def seconds(run: Setup, exact: bool = False) -> float:
    return sum(step(run, exact=exact).values())


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("layers, pp, chunks", [(126, 16, 1), (61, 16, 1), (126, 8, 7), (9, 4, 1)])
def test_layers_are_dealt_out_as_the_package_deals_them(layers: int, pp: int, chunks: int) -> None:
    run = replace(RUN, model=replace(SMALL, layers=layers), pp=pp, chunks=chunks)
    stages = pp * chunks
    usual, light = balance([1.0] * layers, stages), with_light_ends(layers, stages)
    assert run.stages() == tuple(map(len, usual))
    assert replace(run, ends_less=True).stages() == tuple(map(len, light))
    assert [layer for part in light for layer in part] == [*range(layers)]
    for rank, mine in enumerate(run.layers()):
        assert mine == sum(len(usual[stage]) for stage in range(rank, stages, pp))


def test_llama_3_was_dealt_out_so() -> None:
    """On 16 ranks with 8 chunks: the first has the embedding alone first, the last the head last."""
    run = replace(RUN, model=model("llama-405b"), pp=16, schedule="interleaved", chunks=8)
    run = replace(run, ends_less=True)
    assert run.stages() == (0, *[1] * 126, 0)
    assert run.layers() == (7, *[8] * 14, 7)


def peak(schedule: Plan, rank: int, layers: tuple[float, ...]) -> float:
    """Return the most layers in flight on a rank of a plan."""
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUTS: -1}
    row = schedule.actions[rank]
    return max(accumulate(change.get(each.kind, 0) * layers[each.stage] for each in row))


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("light", [False, True])
def test_no_more_layers_are_in_flight_than_are_counted(
    schedule: str, chunks: int, light: bool
) -> None:
    """Of 1f1b, interleaved and a V exactly as many, although stages are uneven."""
    run = on_pipeline(schedule, chunks, ends_less=light)
    made = plan(schedule, 4, run.microbatches, chunks)
    for rank in range(4):
        really = peak(made, rank, run.stages())
        counted = in_flight(run, rank)
        exact = schedule in ("1f1b", "interleaved", *V_SHAPED)
        assert counted == really if exact else counted >= really


def test_what_waits_for_weight_gradients_is_held() -> None:
    """Recomputed for the gradient of its input, a layer is kept until those of its weights."""
    kept = {}
    for schedule, chunks in SCHEDULES:
        run = on_pipeline(schedule, chunks, recompute="full")
        kept[schedule] = bytes_of_stage(run, 3)["activations"]
    assert kept["zb-h1"] > 3 * kept["1f1b"]
    assert kept["zb-v"] > kept["dualpipe-v"] > kept["interleaved"]


def test_a_v_has_both_ends_on_its_first_rank() -> None:
    v, line = on_pipeline("zb-v", 1), on_pipeline("zb-h1", 1)
    first, *_, last = stages_of(v)
    assert first.last > 0 == last.last and stages_of(line)[-1].last == first.last
    table = SMALL.vocabulary * SMALL.hidden
    layer = 2 * SMALL.layer
    assert bytes_of_stage(v, 0)["parameters"] == v.layers()[0] * layer + 2 * 2 * table
    assert bytes_of_stage(v, 3)["parameters"] == v.layers()[3] * layer
    # across 3 borders down and 3 up, of which none is at the turn
    assert bytes_sent(v)["pp"] == 2 * bytes_sent(line)["pp"]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("change", [{}, {"ends_less": True}, {"batch": 12}, {"recompute": "full"}])
def test_uneven_stages_take_as_long_on_a_clock(
    schedule: str, chunks: int, change: dict[str, object]
) -> None:
    """The closed form is within 2 % of a step of many microbatches, and 6 % of one of few."""
    run = on_pipeline(schedule, chunks, **{"batch": 256, **change})
    if schedule == "interleaved" and run.microbatches % 4:
        run = replace(run, batch=16)
    near = 0.02 if run.microbatches > 16 else 0.06
    assert seconds(run) == pytest.approx(seconds(run, exact=True), rel=near)


def test_the_longest_stage_says_how_long_a_step_takes() -> None:
    """A head that takes longer than a layer costs less where its stage has one layer fewer."""
    usual = on_pipeline("1f1b", 1, batch=2048)
    light = replace(usual, ends_less=True)
    assert usual.layers() == (3, 3, 4, 4) and light.layers() == (3, 4, 4, 3)
    assert seconds(light, exact=True) < 0.9 * seconds(usual, exact=True)
    fixed = {"pp": 4, "dp": 2, "schedule": "1f1b", "microbatch": 1}
    assert search(usual, fixed).found[0].run.ends_less
    # where memory is short, what is a little slower is better than nothing
    assert search(on_pipeline("1f1b", 1), fixed).found


# ---------------------------------------------------------------- gradients and shards


def test_zero_2_in_a_pipeline_shares_gradients_out_and_sends_them_more_often() -> None:
    answer = search(RUN, {"zero": 2, "tp": 8, "pp": 2, "microbatch": 1})
    two = answer.found[0].run
    one = replace(two, zero=1, software=RUN.software)
    assert two.schedule == "1f1b" and "which only 1f1b and gpipe do" in str(answer.refused)
    assert bytes_held(two)["gradients"] == bytes_held(one)["gradients"] / 4
    gradients = bytes_sent(one)["dp"] * 4 / (4 + 2)
    more = (two.microbatches - 1) * gradients
    assert bytes_sent(two)["dp"] == pytest.approx(bytes_sent(one)["dp"] + more)
    assert step(two)["data"] > step(one)["data"]


def test_zero_2_is_found_where_zero_1_does_not_fit() -> None:
    """And where ZeRO 1 fits without recomputing, the slower ways to save memory are not tried."""
    fixed = {"pp": 2, "schedule": "1f1b", "microbatch": 1}
    short = search(RUN, fixed | {"tp": 4}).found
    assert {(each.run.zero, each.run.recompute) for each in short} == {(1, "full"), (2, "none")}
    enough = search(RUN, fixed | {"tp": 8}).found
    assert {(each.run.zero, each.run.recompute) for each in enough} == {(1, "none")}


def test_shards_may_be_parts_of_a_node_or_several() -> None:
    found = search(replace(RUN, model=SMALL), {"zero": 3, "tp": 1, "pp": 1}).found
    assert {each.run.hsdp for each in found} == {0, 2, 4, 8, 16, 32}
    found = search(replace(RUN, model=SMALL), {"zero": 3, "hsdp": 32}).found
    assert {each.run.hsdp for each in found} == {32}


def test_attention_is_recomputed_alone_where_its_scores_are_kept() -> None:
    fixed = {"tp": 8, "pp": 4, "zero": 1}
    old = replace(RUN, machine=machine("a100:64"), software=Software.named("megatron-2022"))
    ways = {each.run.recompute for each in search(old, fixed).found}
    assert "selective" in ways
    assert "selective" not in {each.run.recompute for each in search(RUN, fixed).found}


# ---------------------------------------------------------------- what is skipped


@pytest.mark.parametrize(
    ("name", "cluster", "fixed"),
    [
        ("llama-70b", "h100:64", {"tp": 4}),
        ("llama-70b", "h100:8", {"schedule": "1f1b"}),  # nothing fits
        ("deepseek-v3", "h800:512", {"pp": 8, "tp": 1, "schedule": "interleaved"}),
        ("mixtral-8x7b", "a100:16", {"zero": 3}),
    ],
)
def test_what_is_skipped_would_not_have_fitted(
    name: str, cluster: str, fixed: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer changes where every layout is weighed, but many more are."""
    start = replace(RUN, model=model(name), machine=machine(cluster))
    weighed: list[Setup] = []

    def weigh(run: Setup, room: float) -> dict[str, float]:
        weighed.append(run)
        return bytes_held(run, room)

    monkeypatch.setattr("minidist.plan.search.fitting.bytes_held", weigh)
    some = fitting(start, fixed, RESERVE)
    few = len(weighed)
    monkeypatch.setattr("minidist.plan.search.layouts.least_bytes", lambda *_: lambda *_: 0.0)
    monkeypatch.setattr(
        "minidist.plan.search.fitting.bytes_held", lambda run, room: weigh(run, math.inf)
    )
    every = fitting(start, fixed, RESERVE)
    assert len(weighed) - few > 1.2 * few
    assert some == every


def test_a_run_remembers_answers_and_its_copies_do_not() -> None:
    run = on_pipeline("1f1b", 1)
    assert run.layers() is run.layers() and passes_of(run) is passes_of(run)
    other = replace(run, pp=2, dp=4)
    assert other.layers() == (7, 7) != run.layers()
    assert other == on_pipeline("1f1b", 1, pp=2, dp=4)


# ---------------------------------------------------------------- batches


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer without asking `train`, which takes seconds."""
    monkeypatch.setattr("minidist.cli.plan.runnable.train_can_be_asked", lambda: False)


def hours(batches: Iterable[int], **fixed: object) -> list[float]:
    """Return seconds a sequence of the best layout of an 8B model on 64 GPUs, by batch."""
    run = replace(RUN, model=model("llama-8b"), sequence=8192)
    found = []
    for batch in batches:
        best = search(replace(run, batch=batch), fixed).found[0]
        found.append(best.seconds / best.run.batch)
    return found


def test_a_batch_that_grows_by_seven_percent_costs_no_jump() -> None:
    """274 sequences took half as many GPU hours again as 256: 32 replicas do not divide them."""
    taken = hours((256, 274, 293, 314, 336), schedule="1f1b", microbatch=1)
    assert all(abs(more / less - 1) < 0.08 for less, more in pairwise(taken))


@pytest.mark.usefixtures("unasked")
def test_another_batch_is_planned_where_few_layouts_divide_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--model", "llama-8b", "--cluster", "h100:64", "--fixed", "tp=1", "--fixed", "pp=1"]
    assert main([*words, "--batch", str(1021 * 4096)]) == 0
    said = capsys.readouterr().out
    assert "1,024 sequences of 4,096 tokens a step" in said
    sentence = "1,021 sequences a step were asked for, and 1,024 are planned: no layout divides"
    assert sentence in said and "--batch 1024" in said
    assert main([*words, "--batch", str(1024 * 4096), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch"] == {"asked": 1024, "planned": 1024, "saved": 0.0}


def test_a_batch_is_changed_for_what_it_saves_and_no_further() -> None:
    run = replace(RUN, model=model("llama-8b"), sequence=8192)
    fixed = {"schedule": "1f1b", "microbatch": 1}
    answer = search(replace(run, batch=274), fixed)
    planned = answer.found[0].run.batch
    assert planned != answer.asked == 274 and answer.saved > abs(planned / 274 - 1) + 0.02
    assert f"{answer.saved:.0%} fewer GPU hours" in answer.another_batch
    # 256 would save 4 % more than 288, but is 9 % further away
    assert search(replace(run, batch=284), fixed).found[0].run.batch == 288
    with pytest.raises(PlanError, match=r"the nearest batch that fits is 64 sequences: --batch"):
        search(replace(run, batch=40), {"tp": 1, "pp": 1})


def test_a_batch_is_compared_with_others_on_a_clock() -> None:
    """In closed form 130 sequences are hardly slower than 128; on a clock they take 13 % longer."""
    run = Setup(model("llama-70b"), machine("mi355x:64"), 1024, 130, fused_loss=True)
    asked, near = (search(replace(run, batch=batch)) for batch in (130, 128))
    assert (asked.asked, asked.found[0].run.batch) == (130, 128)
    assert asked.found[0].seconds == near.found[0].seconds and asked.saved > 0.1


def test_a_batch_is_changed_where_only_what_offloads_fits() -> None:
    run = Setup(model("llama-8b"), machine("h100:2"), 4096, 16, fused_loss=True)
    fixed = {"tp": 1, "pp": 1, "zero": 1}
    offloads, odd = search(run, fixed), search(replace(run, batch=17), fixed)
    assert {each.run.offload for each in (*offloads.found, *odd.found)} == {True}
    assert odd.asked == 17 and odd.found[0].run.batch in (16, 18) and odd.saved == 1


def test_more_memory_is_not_slower_where_it_need_not_offload() -> None:
    """What fits by computing all again takes longer than what offloads and computes nothing again."""
    run = Setup(model("llama-13b"), machine("h100:2"), 2048, 512, fused_loss=True)
    run = replace(run, optimizer="muon")
    fixed = {"tp": 1, "microbatch": 2, "schedule": "interleaved"}
    device = run.machine.device
    larger = replace(run.machine, device=replace(device, memory=1.3 * device.memory))
    less, more = (search(replace(run, machine=each), fixed) for each in (run.machine, larger))
    assert {each.run.offload for each in less.found} == {True}
    assert {each.run.offload for each in more.found} == {True, False}
    assert more.found[0].seconds <= less.found[0].seconds


def test_one_gpu_offloads() -> None:
    """Nobody shares its states, but its host holds some of them."""
    run = Setup(model("llama-8b"), machine("h100:1"), 4096, 16, fused_loss=True)
    best = search(run).found[0]
    assert best.run.offload and best.run.zero == 1 and not best.bytes["optimizer"]
    with pytest.raises(PlanError, match="the smallest holds"):
        search(run, {"offload": False})


@pytest.mark.parametrize(
    ("sequence", "axes"),
    [(1023, {(1, 1)}), (1026, {(1, 1), (2, 1)}), (1028, {(1, 1), (2, 1), (4, 1), (1, 2)})],
)
def test_sequences_that_few_axes_cut(sequence: int, axes: set[tuple[int, int]]) -> None:
    """Ranks along tp have a share of the tokens, and ranks along cp two shares."""
    run = replace(RUN, model=SMALL, machine=machine("h100:8"), sequence=sequence)
    sizes = product((1, 2, 4), repeat=2)
    assert axes == {(tp, cp) for tp, cp in sizes if not misfit(run, tp, 1, cp, {"cp": cp})}


@pytest.mark.usefixtures("unasked")
def test_who_shares_experts_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Attention on tp=4 dp=2, whole experts on all eight: Megatron's parallel folding."""
    words = "--model mixtral-8x7b --cluster h100:8 --batch 1M --precision fp8"
    fixed = " --fixed tp=4 --fixed pp=1 --fixed ep=2"
    assert main((words + fixed).split()) == 0
    said = capsys.readouterr().out
    assert "experts: whole ones are shared out along ep and tp together" in said
    assert "--tp 4 --ep 2" in said and "--precision fp8" in said
    run = replace(RUN, model=model("mixtral-8x7b"), machine=machine("h100:8"), tp=4, dp=2, ep=2)
    assert run.own_experts == run.model.expert


# ---------------------------------------------------------------- Llama 3


@pytest.mark.usefixtures("unasked")
def test_llama_3s_layout_is_named_with_the_memory_that_it_lacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its own: tp 8, pp 16, dp 128, interleaved, nothing recomputed, at 41 % of the peak
    (Grattafiori et al. 2024, table 4).
    """
    words = "--model llama-405b --cluster h100:16384 --tokens 15T --batch 16M --sequence 8192"
    words += " --fixed microbatch=1 --fixed tp=8"
    assert main(words.split()) == 0
    said = capsys.readouterr().out
    layout = "tp=8 pp=16 dp=128 interleaved x8 light-ends zero=1 microbatch=1"
    sentence = (
        r"with more memory a step would take (\d+)% less, ([\d.]+) s, as "
        rf"{layout}: it holds (\d+) GB a GPU, of which (\d+) are activations"
    )
    named = re.search(sentence, said)
    assert named
    assert main([*words.split(), "--format", "json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    missed, best = tree["missed"], tree["layouts"][0]
    less = 1 - missed["seconds"] / best["seconds"]
    bytes = missed["bytes"]
    figures = (100 * less, missed["seconds"], sum(bytes.values()) / GB, bytes["activations"] / GB)
    assert [float(each) for each in named.groups()] == pytest.approx(figures, abs=0.5)
    assert missed["layout"] == layout and figures[2] > 0.95 * Device.named("h100").memory / GB
    mfu = best["mfu"] * best["seconds"] / missed["seconds"]
    assert mfu == pytest.approx(0.41, rel=0.2)  # of a machine on which nothing ever goes wrong
    # its first chunk has the embedding alone, and its last the head
    assert "light-ends: embedding and head count as a layer each" in said
    layers = re.search(r"layers of the ranks along pp: ([\d ]+)", said)
    assert layers and sum(map(int, layers[1].split())) == 126

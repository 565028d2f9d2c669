"""What software keeps when it saves memory, and what a report says of published runs that a plan would
refuse.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from minidist.cli.plan import command
from minidist.cli.plan.runnable import options
from minidist.plan.device import Constants, Device, PlanError, machine
from minidist.plan.memory import bytes_held, engine
from minidist.plan.memory.activations import layer_of
from minidist.plan.model import Model
from minidist.plan.parts.layer import launched, passes
from minidist.plan.parts.muon import operations_of, orthogonal
from minidist.plan.published.check import check, room
from minidist.plan.published.report import text
from minidist.plan.published.rows import setup as read
from minidist.plan.run import Setup, Software
from minidist.plan.step import step
from minidist.plan.traffic import bytes_sent

KNOWN = Constants.table()
LLAMA = Model(8, 1024, 8, 32000, kv=4, ffn=3584)
LATENT = Model(8, 1024, 8, 32000, head_dim=128, ffn=256, experts=16, top_k=4, shared=1,
               latent=256, query_latent=384, rotary=64)  # fmt: skip
TOKENS = 2 * 512


def setup(model: Model, software: str, **how: Any) -> Setup:
    start = Setup(model, machine("h100:64"), 512, 64, 2, dp=8, software=Software.named(software))
    return replace(start, **how)


# ---------------------------------------------------------------- a layer


def test_a_compiler_keeps_what_products_return() -> None:
    """Queries, keys, values, the output, gate, up and the last product, and the layer's input."""
    held = layer_of(setup(LLAMA, "xla"))
    assert held.saved == TOKENS * 2 * (3 * 1024 + 1024 + 2 * 512 + 2 * 3584)
    cut = layer_of(setup(LLAMA, "xla", tp=4, dp=2, sp=True))
    assert cut.saved == held.saved / 4
    run = setup(LLAMA, "xla")
    assert layer_of(replace(run, recompute="full")).saved == TOKENS * 2 * 1024
    some, all = (passes(replace(run, recompute=each))[1].kinds for each in ("none", "full"))
    assert 0 < some["recomputing"] < all["recomputing"] / 2  # attention, and what is element-wise


def test_a_compiler_gathers_the_weights_of_a_product_at_a_time() -> None:
    run = setup(LLAMA, "xla", zero=3)
    table = 4 * LLAMA.vocabulary * LLAMA.hidden
    assert bytes_held(run)["communication"] == 8 * 1024 * 3584 + table
    eager = replace(run, software=replace(run.software, compiler=False))
    assert bytes_held(eager)["communication"] == 8 * LLAMA.layer + table
    mixture = bytes_held(replace(run, model=replace(LLAMA, ffn=512, experts=8, top_k=2)))
    assert mixture["communication"] == 8 * 8 * 512 * 1024 + table


def test_every_other_product_and_attention_are_kept() -> None:
    """torchtitan's policy, which counts a layer's products from the first: queries, values, the gate
    and the last one.
    """
    kept = layer_of(setup(LLAMA, "fsdp-compiled", recompute="op", zero=3)).saved
    assert kept == TOKENS * 2 * (1024 + 1024 + 512 + 1024 + 3584 + 1024)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_what_is_cheap_is_computed_again(precision: str) -> None:
    """Of a Llama what both norms return, and the product that the last layer reads."""
    run = setup(LLAMA, "megatron-core", precision=precision)
    width = engine.INPUT[precision]
    everything, fewer = layer_of(run), layer_of(replace(run, recompute="parts"))
    again = TOKENS * width * (2 * 1024 + 3584)
    assert everything.saved - fewer.saved == again == fewer.working
    cheap, full = (passes(replace(run, recompute=each))[1].kinds for each in ("parts", "full"))
    assert 0 < cheap["recomputing"] < full["recomputing"] / 4


def test_latent_channels_make_queries_keys_and_values_again() -> None:
    """In 8 bits attention's norm is read by two layers and the other by the shared expert; the router
    reads 16.
    """
    run = setup(LATENT, "megatron-core", precision="fp8")
    norms = (1 + 1) * 1024 + (2 + 1) * 1024 + (384 + 256)
    heads = 2 * 8 * (192 + 192 + 128)
    products = 5 * 256
    saved = layer_of(run).saved - layer_of(replace(run, recompute="parts")).saved
    assert saved == TOKENS * (norms + heads + products)
    fewer = replace(run, software=replace(run.software, narrow=True))
    gates, output = 2 * 256 * 5, (2 + 1 - 1.5) * 8 * 128
    assert layer_of(run).saved - layer_of(fewer).saved == TOKENS * (gates + output)


def test_parts_are_refused_where_nobody_wrote_them_down() -> None:
    with pytest.raises(PlanError, match="recompute=parts is not known of xla: choose full"):
        bytes_held(setup(LLAMA, "xla", recompute="parts"))


# ---------------------------------------------------------------- states


def test_an_interleaved_pipeline_reduces_a_chunk_at_a_time() -> None:
    """Whole are the gradients of the chunk at work and of the one that is reduced."""
    run = setup(LLAMA, "megatron-core", pp=2, dp=4, schedule="interleaved", chunks=4)
    one, two = (bytes_held(replace(run, zero=zero))["gradients"] for zero in (1, 2))
    assert two == one * 2 / 4
    assert replace(run, zero=2).reductions == 2
    plain = replace(run, zero=2, schedule="1f1b", chunks=1)
    # which has a chunk's microbatches not in a row, and reduces each
    assert plain.reductions == 1 and bytes_held(plain)["gradients"] == one / 4


def test_moments_of_16_bits_take_half() -> None:
    run = setup(LLAMA, "megatron-core")
    wide, narrow = (
        bytes_held(replace(run, optimizer=each))["optimizer"] for each in ("adamw", "adamw-16")
    )
    assert narrow / wide == 8 / 12
    own = replace(run, zero=3, software=Software.named("fsdp-compiled"))
    wide, narrow = (
        bytes_held(replace(own, optimizer=each))["optimizer"] for each in ("adamw", "adamw-16")
    )
    assert narrow / wide == 4 / 8


# ---------------------------------------------------------------- Muon


def test_muon_keeps_one_moment_of_the_matrices_in_layers() -> None:
    """Of 4 bytes, where AdamW keeps two; embedding and head have AdamW still."""
    run = setup(LLAMA, "megatron-core")
    wide, narrow = (bytes_held(replace(run, optimizer=each)) for each in ("adamw", "muon"))
    assert wide["optimizer"] - narrow["optimizer"] == 4 * 8 * LLAMA.layer
    shared = bytes_held(replace(run, optimizer="muon", zero=1))
    assert shared["optimizer"] == narrow["optimizer"] / 8


def test_muon_computes_and_sends_what_its_papers_say() -> None:
    """Of a matrix of n x m 4 n^2 m + 2 n^3 operations, five times; slices there and back."""
    run = setup(LLAMA, "megatron-core", optimizer="muon", zero=1)
    square, keys, inner = (1024, 1024), (1024, 512), (1024, 3584)
    each = sum(map(orthogonal, (square, keys, keys, square, inner, inner, inner)))
    assert orthogonal(square) == 5 * 6 * 1024**3 and orthogonal((512, 1024)) == orthogonal(keys)
    assert operations_of(run) == each / 8  # ranks share out the matrices
    assert operations_of(replace(run, zero=0)) == each
    ours, adamw = (bytes_sent(replace(run, optimizer=name)) for name in ("muon", "adamw"))
    matrices = 4 * 8 * LLAMA.layer
    assert ours["dp"] - adamw["dp"] == pytest.approx(2 * (7 / 8) * matrices)
    cut = replace(run, tp=4, dp=2, sp=True)
    ours, adamw = (bytes_sent(replace(cut, optimizer=name)) for name in ("muon", "adamw"))
    assert ours["tp"] - adamw["tp"] == pytest.approx(3 * matrices)
    took = [step(replace(run, optimizer=name))["optimizer"] for name in ("adamw", "muon")]
    assert took[1] > took[0] > 0
    mixture = replace(LLAMA, ffn=64, experts=64, top_k=2)
    ours = operations_of(replace(run, model=mixture, ep=8))
    of_expert = 3 * orthogonal((1024, 64))
    others = sum(map(orthogonal, (square, keys, keys, square, (1024, 64))))
    assert ours == pytest.approx(8 * of_expert + others / 8)  # an expert has one copy


def test_the_command_plans_with_muon() -> None:
    words = ["--model", "llama-8b", "--cluster", "h100:8"]
    for more, found in (([], "adamw"), (["--optimizer", "muon"], "muon")):
        run = command.setup(command.parser().parse_args([*words, *more]))
        assert run.optimizer == found
        assert options(replace(run, dp=8)).get("optimizer", "adamw") == found


# ---------------------------------------------------------------- a host that launches


def test_without_cuda_graphs_each_expert_is_launched() -> None:
    model = replace(LLAMA, ffn=64, experts=64, top_k=2)
    run = setup(model, "megatron-core-2025-eager", ep=4)
    known = run.known
    assert launched(run) == known["host"] + known["host_experts"] + 16 * known["host_expert"]
    assert launched(replace(run, ep=8)) == launched(run) - 8 * known["host_expert"]
    forward, backward = passes(run)
    assert forward.seconds == launched(run) and backward.seconds == 2 * launched(run)
    graphs = replace(run, software=Software.named("megatron-core-2025"))
    assert launched(graphs) == known["host"] == launched(replace(run, model=LLAMA))


# ---------------------------------------------------------------- published rows


ROW: dict[str, Any] = {
    "id": "one",
    "source": "a laboratory, container 25.11",
    "kind": "throughput",
    "config": {
        "arch": "llama", "gpu": "H100", "hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn": 28672,
        "vocab": 128256, "seq": 4096, "gpus": 64, "tp": 4, "pp": 4, "dp": 4, "micro_batch": 1, "global_batch": 64,
        "precision": "bf16", "sequence_parallel": True, "recompute": "none",
    },
    "measured": {"step_time_s": 5.0},
}  # fmt: skip


def row(**change: Any) -> dict[str, Any]:
    found = copy.deepcopy(ROW)
    found["config"] |= change
    return found


def test_what_recipes_do_is_read_from_their_year() -> None:
    """Gradients in 16 bits from 2025, a distributed optimizer, no graphs for experts on Hopper."""
    run = read(row(), KNOWN)
    assert (run.gradients, run.zero) == (2, 1)
    assert read(row() | {"source": "container 24.07"}, KNOWN).gradients == 4
    eager = read(row(compile=False) | {"source": "nobody"}, KNOWN)
    assert read(row(zero=0), KNOWN).zero == 0 == eager.zero
    mixture = {"arch": "llama-moe", "experts": 8, "top_k": 2, "zero": 1}
    assert read(row(**mixture), KNOWN).software.name == "megatron-core-2025-eager"
    assert read(row(gpu="B200", **mixture), KNOWN).software.name == "megatron-core-2025"


def test_a_memory_is_what_the_driver_counts() -> None:
    assert Device.named("h100").memory == pytest.approx(81559 * 2**20, rel=1e-3)
    assert Device.named("tpu-v5p").memory == pytest.approx(95.74 * 2**30, rel=1e-3)


def test_a_report_names_what_would_explain_a_run_that_ran() -> None:
    """Each in turn: a little, then more than tensors, than what is cheap, and than all activations."""
    found = []
    for change in (
        {},
        {"micro_batch": 2},
        {"micro_batch": 2, "seq": 5120},
        {"micro_batch": 4},
        {"tp": 1, "dp": 16, "sequence_parallel": False},
        {"micro_batch": 4, "inferred": "micro_batch, global_batch"},
    ):
        refused = room([row(**change)], KNOWN)["refused"]
        found.append(refused[0]["why"] if refused else "")
    assert found == [
        "",
        "its tensors alone fit",
        "it fits if it computes norms and activations again",
        "it fits with activations of some layers in the host's memory",
        "nothing that is known explains it",
        "its micro_batch was not published",
    ]


def test_memory_is_not_compared_where_its_microbatch_was_not_published() -> None:
    good, bad = row(), row(inferred="micro_batch")
    for each in (good, bad):
        each["measured"]["peak_memory_gib"] = 40.0
    report = check([good, bad | {"id": "two"}], KNOWN)
    assert [each["id"] for each in report["rows"] if each["quantity"] == "memory"] == ["one"]
    assert report["inferred"] == ["two"]
    refused = [{"id": "x", "needs": 90.0, "has": 80.0, "why": "its tensors alone fit"}]
    said = text(report | {"room": {"ran": 3, "refused": refused}})
    assert "of 3 runs that ran 1 are predicted not to fit\n  1: its tensors alone fit" in said

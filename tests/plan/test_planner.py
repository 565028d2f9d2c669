"""The planner: its constants, the laws that its predictions obey, what it holds, finds and
refuses.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from minidist.cli.plan import command
from minidist.cli.plan.command import main
from minidist.plan.cost import cost
from minidist.plan.device import Constants, PlanError, machine, table
from minidist.plan.equation import layer_activations, layer_input, model_states
from minidist.plan.memory import GB, bytes_held
from minidist.plan.model import Model, model
from minidist.plan.run import Setup, Software
from minidist.plan.search import search
from minidist.plan.step import step

REPOSITORY = Path(__file__).parents[2]
SMALL = Model(12, 1024, 16, 32000, kv=8, ffn=2816)
RUN = Setup(model("llama-70b"), machine("h100:64"), 4096, 1024)


def layouts() -> list[Setup]:
    """Return layouts of all axes."""
    return [
        replace(RUN, tp=8, pp=2, dp=4, zero=1, sp=True, recompute="full"),
        replace(RUN, tp=4, pp=4, dp=4, sp=True, schedule="interleaved", chunks=5),
        replace(RUN, dp=64, zero=3, microbatch=2),
        replace(RUN, dp=64, zero=3, hsdp=8, recompute="full"),
        replace(RUN, tp=2, cp=4, dp=8, sequence=32768, batch=128, zero=2, sp=True),
        replace(RUN, tp=8, pp=8, dp=1, sp=True, schedule="zb-h1", offload=True),
        replace(RUN, model=model("qwen3-30b-a3b"), dp=64, ep=8, zero=1),
        replace(
            RUN, model=model("gpt3-175b"), tp=8, pp=8, software=Software.named("megatron-2021")
        ),
    ]


def seconds(run: Setup) -> float:
    return sum(step(run).values())


# ---------------------------------------------------------------- constants


def test_every_constant_has_a_source_and_is_inside_its_range() -> None:
    entries = table("constants")
    assert sum(entry.get("fitted", False) for entry in entries.values()) <= 20
    for name, entry in entries.items():
        low, high = entry["range"]
        assert low <= entry["value"] <= high and len(entry["source"]) > 20, name


def test_a_constant_that_there_is_not_cannot_be_changed() -> None:
    with pytest.raises(PlanError, match="there is no constant 'across'"):
        Constants.table().but(across=1.0)


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("better", ("peak", "bandwidth", "link", "across", "reached"))
def test_better_hardware_is_never_slower(better: str) -> None:
    for run in layouts():
        site = run.machine
        if better == "across":
            faster = replace(site, across=1.7 * site.across)
        else:
            faster = replace(
                site, device=replace(site.device, **{better: 1.2 * getattr(site.device, better)})
            )
        assert seconds(replace(run, machine=faster)) <= seconds(run)


def test_twice_the_nodes_are_at_most_twice_as_fast() -> None:
    """With memory without end; with less, more GPUs may also save recomputation."""

    def best(gpus: int) -> float:
        many = machine(f"h100:{gpus}")
        many = replace(many, device=replace(many.device, memory=1e15))
        return search(replace(RUN, machine=many)).found[0].seconds

    took = [best(gpus) for gpus in (16, 32, 64, 128, 256)]
    assert all(few / 2 <= many < few for few, many in pairwise(took))


def test_a_smaller_price_costs_less_and_failures_cost_time() -> None:
    found = search(RUN).found[0]
    cheap, dear, unlucky = (
        cost(found, 1e12, *how) for how in ((1.0, 57), (2.0, 57), (1.0, 57, 5.0))
    )
    assert dear["money"] == 2 * cheap["money"] and dear["kwh"] == cheap["kwh"]
    assert unlucky["days"] > cheap["days"] > cheap["undisturbed"]
    assert cheap["co2"] == pytest.approx(cheap["kwh"] * 57 / 1e6)


def test_bloom_used_the_energy_that_was_reported() -> None:
    """1,082,990 hours of A100 took 433,196 + 256,646 kWh (Luccioni et al. 2022)."""
    found = search(replace(RUN, machine=machine("a100:64"))).found[0]
    used = cost(found, 1e12, 1.0, 57)
    assert used["kwh"] / used["gpu_hours"] == pytest.approx((433196 + 256646) / 1082990, rel=0.01)


@pytest.mark.parametrize("run", layouts()[:2] + layouts()[5:6])
def test_the_closed_form_is_near_the_plan_on_a_clock(run: Setup) -> None:
    assert seconds(run) == pytest.approx(sum(step(run, exact=True).values()), rel=0.02)


# ---------------------------------------------------------------- memory


def test_what_a_gpu_holds_is_made_of_the_formulas() -> None:
    gpt = Model(10, 1024, 16, 1000, gated=False, dropout=True)
    run = Setup(gpt, machine("a100:8"), 512, 64, 2, dp=4, pp=2)
    run = replace(run, software=replace(run.software, engine=False))
    first = bytes_held(run)
    own = 5 * 12 * 1024**2 + 1000 * 1024
    states = model_states(own, 4, 0)
    assert first["parameters"] == states.parameters and first["gradients"] == 2 * states.gradients
    assert first["activations"] == 2 * 5 * layer_activations(
        512, 2, 1024, 16, attention_weights=False
    )
    again = bytes_held(replace(run, recompute="full", zero=1))
    assert again["optimizer"] == model_states(own, 4, 1).optimizer
    whole, entry = (
        layer_activations(512, 2, 1024, 16, attention_weights=False),
        layer_input(512, 2, 1024),
    )
    assert again["activations"] == 10 * entry + whole - entry


@pytest.mark.parametrize(
    ("how", "less"),
    (({"zero": 1}, "optimizer"), ({"zero": 2}, "gradients"), ({"zero": 3}, "parameters")),
)
def test_zero_shares_out_one_category_more(how: dict[str, int], less: str) -> None:
    run = replace(RUN, model=SMALL, dp=64, batch=64)
    assert bytes_held(replace(run, **how))[less] == bytes_held(run)[less] / 64  # type: ignore[arg-type]


def test_a_mixture_on_256_gpus_holds_what_its_experts_copies_leave() -> None:
    """8 copies of each expert, not 32, share its 12 bytes of state: by hand 80.1 GB, more than an
    A100 has.
    """
    run = replace(
        RUN, model=model("mixtral-8x22b"), machine=machine("a100:256"), schedule="zb-h1", sp=True
    )
    run = replace(
        run, tp=2, pp=4, dp=32, ep=4, zero=1, software=Software.named("megatron-core-ampere")
    )
    assert sum(bytes_held(replace(run, fused_loss=True)).values()) / GB == pytest.approx(
        80.1, abs=0.1
    )


# Billions of parameters, as their papers and cards have them.
PUBLISHED = {
    "llama-7b": 6.738,
    "llama-13b": 13.016,
    "llama-8b": 8.03,
    "llama-70b": 70.55,
    "llama-405b": 405.9,
}
PUBLISHED |= {
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 140.6,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1,
}
PUBLISHED |= {"gpt3-175b": 174.6, "bloom-176b": 176.2, "gpt2-xl": 1.56, "palm-540b": 540.35}
PUBLISHED |= {"deepseek-v2": 236, "deepseek-v3": 671, "kimi-k2": 1026, "gpt-oss-120b": 116.8}


def test_every_model_of_the_table_has_its_published_parameters() -> None:
    assert PUBLISHED.keys() == table("models").keys()
    for name, billions in PUBLISHED.items():
        assert model(name).parameters == pytest.approx(billions * 1e9, rel=4e-3), name


# ---------------------------------------------------------------- search


def test_the_best_layout_is_found_and_fits() -> None:
    answer = search(RUN)
    assert [each.seconds for each in answer.found[:24]] == sorted(
        each.seconds for each in answer.found[:24]
    )
    has = RUN.machine.device.memory
    assert all(sum(each.bytes.values()) <= has for each in answer.found)
    assert sum(answer.refused.values()) > 100
    for each in random.Random(0).sample(answer.found, 20):
        run = each.run
        assert (
            run.tp * run.pp * run.dp * run.cp == 64 and run.batch % (run.dp * run.microbatch) == 0
        )


def test_both_orders_of_the_axes_are_looked_at() -> None:
    """Where replicas are neighbours they share a node's network cards; where stages are, messages
    stay inside.
    """
    fixed = {"tp": 2, "pp": 4, "schedule": "1f1b", "microbatch": 1, "zero": 1, "recompute": "full"}
    near = {each.run.order: each for each in search(RUN, fixed).found}
    inside, across = near["dp", "pp", "cp", "tp"], near["pp", "dp", "cp", "tp"]
    assert not inside.run.group("pp").crosses(RUN.machine) and across.run.group("pp").crosses(
        RUN.machine
    )
    assert across.step["data"] < inside.step["data"]


def test_a_small_layer_waits_for_the_host() -> None:
    small = step(replace(RUN, model=Model(12, 256, 4, 1000), dp=64, sequence=128))
    assert small["host"] > small["computing"] and small["sharding"] == 0 == step(RUN)["host"]


def test_two_sites_share_the_layers_out_by_speed() -> None:
    answer = search(replace(RUN, machine=machine("h100:32+a100:32@12.5e9")), {"pp": 4})
    cut = answer.found[0].run.cut
    assert sum(cut) == 80 and cut[0] == cut[1] > 2 * cut[3] and abs(cut[2] - cut[3]) <= 1
    # half of the hours at each site's price and power
    bill = cost(answer.found[0], 1e12, None, 400)
    assert bill["money"] == pytest.approx(bill["gpu_hours"] * (2.49 + 1.8) / 2)
    assert bill["kwh"] == pytest.approx(bill["gpu_hours"] * (0.7 + 0.4) / 2 * 1.59)


# ---------------------------------------------------------------- the command

ASKED = [
    "--model",
    "llama-8b",
    "--cluster",
    "h100:16",
    "--tokens",
    "100B",
    "--batch",
    "1M",
    "--sequence",
    "4096",
]


def test_the_command_answers_in_text_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ASKED) == 0
    said = capsys.readouterr().out
    for word in (
        "MFU",
        "bubble" if "pp=" in said else "computing",
        "activations",
        "loses by",
        "refused:",
        "#SBATCH",
        "kWh",
    ):
        assert word in said
    assert main([*ASKED, "--format", "json", "--why", "tp=2 dp=8 zero=1"]) == 0
    first = json.loads(capsys.readouterr().out)["layouts"][0]
    assert first["layout"].startswith("tp=2 dp=8 zero=1") and first["seconds"] == pytest.approx(
        sum(first["step"].values())
    )


def test_train_knows_the_command_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    from minidist.cli import train

    for model_name in ("llama-8b", "mixtral-8x7b"):
        assert main(["--model", model_name, *ASKED[2:], "--fixed", "tp=2"]) == 0
        line = next(
            line for line in capsys.readouterr().out.splitlines() if line.startswith("srun")
        )
        assert train.main([*line.split()[5:], "--print-config"]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (
            ["--model", "llama-9b"],
            "'llama-9b' is not in models.toml: did you mean llama-.*\\? Or choose one of gpt3-175b",
        ),
        (["--cluster", "h100"], "'h100' does not say how many GPUs: write h100:64"),
        (["--cluster", "h100:12"], "12 GPUs fill no whole nodes of 8: say 8 or 16"),
        (
            ["--cluster", "tpu:8"],
            "'tpu' is not in clusters.toml: did you mean tpu-v4\\? Or choose one of v100",
        ),
        (
            ["--cluster", "h100:8", "--model", "llama-405b"],
            "no layout fits 8 GPUs of h100: .*the smallest holds",
        ),
        (["--fixed", "zero=1", "--fixed", "size=2"], "size cannot be fixed: choose among tp"),
        (["--tokens", "many"], "'many' must be a number: write 1.4T"),
        (["--batch", "1K"], "--batch 1K holds no sequence of 4096 tokens"),
        (["--why", "tp=3"], "no layout fits 16 GPUs of h100: .*do not divide the GPUs"),
        (["--fixed", "tp=two"], "tp=two cannot be: it is a whole number, at least 1"),
        (
            ["--fixed", "recompute=some"],
            "recompute=some cannot be: it is one of none, selective, full",
        ),
        (
            ["--fixed", "ep=4", "--fixed", "tp=2", "--fixed", "pp=1"],
            "share out experts, of which the model has none",
        ),
        (
            ["--cluster", "a100:8", "--precision", "fp8"],
            "--precision fp8: a100-80 multiplies no faster in 8 bits",
        ),
        (["--top", "0"], "--top 0 must be from 1 to 1,000,000"),
        (["--price", "-1"], "--price -1.0 must be from 0 to 1,000,000"),
        (["--picture", "plan.bmp"], "--picture plan.bmp has no known format: let it end in .png"),
        (
            ["--cluster", "here"],
            "--cluster here measures a small model of its own: leave all other options out",
        ),
        (["--software", "jax"], "'jax' is not in software.toml: choose one of megatron-2021"),
    ),
)
def test_bad_input_gets_one_sentence(
    change: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASKED, *change]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and said.count("\n") == 1


def test_measuring_this_machine_takes_no_option_that_it_would_leave_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "measure_here", lambda: 0)
    for words in (["--cluster", "here"], ["--cluster=here"]):
        assert main(words) == 0
    for words in (["--cluster=here", "--top=3"], ["--model=gpt2-xl", "--cluster=here"]):
        assert main(words) == 2
        assert "leave all other options out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "write",
    (
        lambda: {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "vocab_size": 99,
        },
    ),
)
def test_a_config_json_is_a_model(write: Callable[[], dict[str, int]], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            write()
            | {"intermediate_size": 128, "num_key_value_heads": 2, "tie_word_embeddings": True}
        )
    )
    assert model(str(path)) == Model(2, 64, 4, 99, kv=2, ffn=128, tied=True)
    path.write_text("{}")
    with pytest.raises(PlanError, match="does not say heads, hidden, layers, vocabulary"):
        model(str(path))
    path.write_text(
        json.dumps(
            {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 99}
        )
    )
    assert model(str(path)) == Model(2, 64, 4, 99, gated=False, tied=True)
    path.write_text(json.dumps(write() | {"mlp_only_layers": [0]}))
    with pytest.raises(PlanError, match="has mlp_only_layers, which no plan is made for"):
        model(str(path))


def test_layers_with_and_without_windows_are_planned(tmp_path: Path) -> None:
    """GPT-OSS: every other layer has a window. Its attention takes the mean of both kinds."""
    said = {
        "model_type": "gpt_oss", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
        "head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256,
        "vocab_size": 1024, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(said))
    mixed = model(str(path))
    assert (mixed.window, mixed.unwindowed) == (128, 2)
    none, every = (replace(mixed, window=window, unwindowed=0) for window in (0, 128))
    times = [
        step(replace(RUN, model=each, dp=64, sequence=8192))["computing"]
        for each in (none, mixed, every)
    ]
    assert times[0] > times[1] > times[2]
    assert times[1] == pytest.approx((times[0] + times[2]) / 2)
    assert 2 * mixed.flops(8192) == pytest.approx(none.flops(8192) + every.flops(8192))
    path.write_text(json.dumps(said | {"layer_types": ["linear_attention", "full_attention"] * 2}))
    with pytest.raises(PlanError, match="has layer_types, which no plan is made for"):
        model(str(path))


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
}


def test_a_config_with_latent_attention_is_planned(tmp_path: Path) -> None:
    """671 billion parameters and 37 active ones, as the model's report says."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V3))
    found = model(str(path))
    assert (found.latent, found.dense_layers, found.dense_ffn, found.predicted) == (
        512,
        3,
        18432,
        1,
    )
    assert found.parameters / 1e9 == pytest.approx(671, rel=0.001)
    assert found.active / 1e9 == pytest.approx(37, rel=0.02)
    for change in ({"moe_layer_freq": 2}, {"qk_nope_head_dim": 64}):
        path.write_text(json.dumps(DEEPSEEK_V3 | change))
        with pytest.raises(PlanError, match=f"has {next(iter(change))}, which no plan is made for"):
            model(str(path))

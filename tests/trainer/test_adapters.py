"""Adapters, products in 8 bits and ZeRO++ from the command line: every rank trains what was asked
for.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import mpirun
from safetensors.torch import load_file
from torch import Tensor, nn
from training import PROGRAM, TINY, count_calls, losses, same_bits, tensors, train_on

import minidist
from minidist.__main__ import main
from minidist.cli.train import train
from minidist.cli.train_checks import check_memory
from minidist.full.adapters import add_lora
from minidist.full.comm import Cluster
from minidist.full.model import GPT, GPTConfig
from minidist.full.precision import fp8
from minidist.full.trainer.config import ConfigError
from minidist.full.trainer.foreign import load_llama, save_llama
from minidist.full.trainer.loop import Trainer
from minidist.further import Config, RunOptions, add_qlora
from minidist.further.nf4.nf4 import dequantize, quantize

SIZES = GPTConfig(
    layers=2, hidden=16, heads=4, key_value_heads=2, sequence=16, rope_theta=500_000.0
)
RUN = "--layers 2 --heads 4 --key-value-heads 2 --steps 2 --lr 0.01"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama whose weights are no fresh ones."""
    model = GPT(SIZES, torch.Generator().manual_seed(5))
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, 0.2, generator=torch.Generator().manual_seed(6))
    save_llama(model, folder := tmp_path_factory.mktemp("llama"))
    return folder


def refusal(ranks: int, words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one sentence with which a command line is refused."""
    assert train_on(ranks, RUN, words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


# ---------------------------------------------------------------- adapters


@pytest.mark.parametrize(
    "ranks, layout",
    [
        (1, "--lora 4"),
        (2, "--lora 4 --zero 1 --accumulate 2"),
        (2, "--qlora --zero 3 --recompute full"),
        (4, "--lora 2 --tp 2 --sp --zero 2"),
        # two ranks share each head of keys and values
        (4, "--lora 3 --tp 4 --recompute selective"),
        (4, "--qlora --pp 2 --schedule zb-h1"),
        (4, "--lora 4 --pp 2 --zero 3 --schedule gpipe"),
        (2, "--qlora --precision bfloat16 --zero 3"),
        (2, "--lora 4 --precision fp8"),
    ],
)
def test_adapters_are_those_of_the_serial_run(
    ranks: int, layout: str, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_on(ranks, RUN, f"--init {llama} --verify", layout) == 0
    out = capsys.readouterr().out
    assert "same parameters as the serial run" in out and "same bits on every rank" in out


@pytest.mark.parametrize("words", ["--lora 4", "--qlora"])
@pytest.mark.parametrize(
    "ranks, layout",
    [
        pytest.param(1, "", marks=pytest.mark.soak),
        (2, ""),
        (3, "--zero 3"),
        (2, "--pp 2"),
        (2, "--zero 2"),
        (4, "--zero 3 --zeropp"),
    ],
)
def test_adapters_change_on_every_rank_alike_and_nothing_else_does(
    words: str, ranks: int, layout: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, Tensor]] = []
    plain = Trainer._whole_model

    def keep(trainer: Trainer) -> GPT:
        whole = plain(trainer)
        found.append(
            {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
        )
        return whole

    monkeypatch.setattr(Trainer, "_whole_model", keep)
    assert train_on(ranks, RUN, f"--init {llama} --precision float64 {words} {layout}") == 0
    start = load_llama(llama, torch.float64)
    (add_lora if words == "--lora 4" else add_qlora)(
        start, rank=int(words.split()[1]) if words == "--lora 4" else 8
    )
    before = dict(start.named_parameters())
    assert len(found) == ranks
    for after in found:
        assert after.keys() == before.keys()
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        assert changed == {name for name, parameter in before.items() if parameter.requires_grad}
        assert all(torch.equal(after[name], found[0][name]) for name in after)


@pytest.mark.parametrize("words", ["--lora 4", "--qlora"])
def test_a_checkpoint_keeps_what_is_trained_and_goes_on_bit_for_bit_on_another_layout(
    words: str, llama: Path, tmp_path: Path
) -> None:
    asked = f"--init {llama} --precision float64 --save-every 1 {words}"
    assert train_on(1, RUN, asked, f"--steps 4 --save {tmp_path / 'a'} --keep 9") == 0
    shutil.copytree(
        tmp_path / "a", tmp_path / "b", ignore=lambda _, names: [n for n in names if n[-1] in "34"]
    )
    stored = tensors(tmp_path / "a" / "step-00000002")
    assert {name.rpartition("/")[0] or name for name in stored} == {
        n for n in stored if n.endswith((".A", ".B"))
    }
    assert any(name.endswith(".A/exp_avg") for name in stored)
    layout = "--zero 3" if words == "--qlora" else "--tp 2"
    assert train_on(2, RUN, asked, f"--steps 4 --save {tmp_path / 'b'} --resume {layout}") == 0
    for (_, one), (_, other) in zip(
        losses(tmp_path / "a" / "metrics.jsonl")[2:],
        losses(tmp_path / "b" / "metrics.jsonl")[-2:],
        strict=True,
    ):
        assert one == pytest.approx(other, rel=1e-12)
    ours, theirs = (tensors(tmp_path / run / "step-00000004") for run in "ab")
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-12)


def test_a_base_that_changed_or_is_gone_is_named(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(llama, base := tmp_path / "base")
    asked = f"--init {base} --lora 4 --save {tmp_path / 'a'}"
    assert train_on(1, RUN, asked) == 0
    model = load_llama(base)
    with torch.no_grad():
        model.layers[1].mlp.up.weight[3, 5] += 0.5
    save_llama(model, base)
    capsys.readouterr()
    assert f"adapters for other weights than {base} has now: bring that folder back" in refusal(
        2, f"{asked} --steps 3 --resume", capsys
    )
    shutil.rmtree(base)
    assert f"--init {base}: " in refusal(1, f"{asked} --steps 3 --resume", capsys)


@pytest.mark.parametrize(
    "ranks, words, sentence",
    [
        (1, "--lora 4", "--lora 4 is for runs with --init FOLDER: add that, or leave --lora out"),
        (1, "--qlora", "--qlora is for runs with --init FOLDER: add that, or leave --qlora out"),
        (
            2,
            "--init {} --qlora --tp 2",
            "--qlora shares scales out within whole matrices, which --tp 2 cuts",
        ),
        (
            1,
            "--init {} --lora 4 --optimizer muon",
            "--lora and --qlora train two factors of a change, which --optimizer muon",
        ),
        (
            1,
            "--init {} --qlora --optimizer muon",
            "--lora and --qlora train two factors of a change, which --optimizer muon",
        ),
        (
            1,
            "--init {} --qlora --precision fp8",
            "--precision fp8 multiplies matrices of 16 bits or more",
        ),
        (
            2,
            "--pp 2 --schedule zb-h1 --precision fp8",
            "--precision fp8 does not go with zb-h1: use the schedule",
        ),
        (2, "--zeropp", "--zeropp is for runs with --zero 3: add that, or leave --zeropp out"),
        (4, "--zeropp --zero 3 --hsdp 2", "not groups of 2 ranks: use --zero 3 alone"),
        (2, "--zeropp --zero 3 --verify", "its parameters are not those of the serial run"),
    ],
)
def test_what_is_not_offered_gets_a_sentence(
    ranks: int, words: str, sentence: str, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refusal(ranks, words.format(llama), capsys)


@pytest.fixture(scope="module", params=["--lora 4 --tp 2", "--qlora --zero 3"])
def run(
    request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of adapters on 2 ranks."""
    folder = tmp_path_factory.mktemp("run") / "a"
    assert (
        train_on(2, RUN, f"--init {llama} {request.param} --steps 4 --lr 0.1 --save {folder}") == 0
    )
    return folder


def test_adapters_are_merged_into_a_llama_or_written_as_peft_reads_them(
    run: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What PEFT computes, and the names that it asks for, are told apart here: it is not
    installed.
    """
    transformers = pytest.importorskip("transformers")
    assert main(["export", str(run), "--to", str(tmp_path / "merged")]) == 0
    assert main(["export", str(run), "--to", str(tmp_path / "alone"), "--adapters"]) == 0
    told = capsys.readouterr().out
    assert (
        f'PeftModel.from_pretrained(model, "{tmp_path / "alone"}"), beside the model in {llama}'
        in told
    )
    said = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    qlora = len(said["target_modules"]) == 7
    assert ("in the 4 bits (nf4)" in told) == qlora
    every = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert said["target_modules"] == (every if qlora else ["q_proj", "v_proj"])
    assert (said["peft_type"], said["task_type"], said["r"], said["lora_alpha"]) == (
        "LORA",
        "CAUSAL_LM",
        8 if qlora else 4,
        16,
    )
    assert said["base_model_name_or_path"] == str(llama)
    adapters = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(llama), dtype="float32")
    for target in said["target_modules"]:
        for number in range(SIZES.layers):
            name = next(
                name for name in adapters if f".{number}." in name and f".{target}.lora_A." in name
            )
            assert name.startswith(f"base_model.model.model.layers.{number}.")
            weight = theirs.get_parameter(
                name.removeprefix("base_model.model.").replace(".lora_A", "")
            )
            down, up = adapters.pop(name), adapters.pop(name.replace("lora_A", "lora_B"))
            assert (down.shape, up.shape) == (
                (said["r"], weight.shape[1]),
                (weight.shape[0], said["r"]),
            )
            base = dequantize(quantize(weight.detach())) if qlora else weight.detach()
            weight.data = base + said["lora_alpha"] / said["r"] * up @ down
    assert not adapters
    tokens = torch.tensor([list(b"of the class")])
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path / "merged"), dtype="float32"
    )
    torch.testing.assert_close(theirs(tokens).logits, merged(tokens).logits)
    before = transformers.AutoModelForCausalLM.from_pretrained(str(llama), dtype="float32")
    assert (merged(tokens).logits - before(tokens).logits).abs().max() > 1e-2


def test_exports_of_adapters_that_cannot_be(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(llama, base := tmp_path / "base")
    assert train_on(1, RUN, f"--init {base} --lora 4 --save {tmp_path / 'a'}") == 0
    assert train_on(1, RUN, f"--save {tmp_path / 'whole'}") == 0
    capsys.readouterr()
    for run, damage, sentence in (
        ("whole", None, "has no adapters, but all parameters: leave --adapters out"),
        (
            "a",
            "change",
            f"has adapters for other weights than {base} has now: bring that folder back",
        ),
        ("a", "remove", "has adapters alone, and the weights beside them: --init"),
    ):
        if damage == "change":
            model = load_llama(base)
            nn.init.zeros_(model.norm.weight)
            save_llama(model, base)
        elif damage == "remove":
            shutil.rmtree(base)
        assert main(["export", str(tmp_path / run), "--to", str(tmp_path / "b"), "--adapters"]) == 2
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1
        assert not (tmp_path / "b").exists()


# ---------------------------------------------------------------- 8 bits


@pytest.mark.parametrize(
    "ranks, layout", [(1, ""), (2, "--zero 1"), (3, "--zero 3"), (4, "--zero 3 --hsdp 2"), (4, "--tp 2 --sp"),
                      (4, "--tp 2 --pp 2 --recompute full"), (2, "--zero 2 --accumulate 2")]
)  # fmt: skip
def test_products_in_8_bits_train_the_serial_model(
    ranks: int, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_on(ranks, RUN, f"--precision fp8 --verify {layout}") == 0
    assert "at most twice that of the serial fp8 run" in capsys.readouterr().out


@pytest.mark.parametrize(
    "ranks, layout", [(1, ""), (2, "--tp 2"), (2, "--zero 3"), (2, "--pp 2"), (4, "--pp 2 --tp 2")]
)
def test_every_product_of_the_blocks_is_one_of_8_bits(
    ranks: int, layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: Counter[str] = Counter()
    count_calls(calls, fp8, "scaled_matmul", monkeypatch)
    words = f"--steps 1 {layout}" + " --microbatches 2" * ("pp" in layout)
    assert train_on(ranks, RUN, words, f"--precision fp8 --metrics {tmp_path / '8'}") == 0
    # ranks, or microbatches
    copies = {"": 1, "--tp 2": 2, "--zero 3": 2, "--pp 2": 2, "--pp 2 --tp 2": 4}[layout]
    assert calls["scaled_matmul"] == 3 * 7 * SIZES.layers * copies
    assert train_on(ranks, RUN, words, f"--precision float32 --metrics {tmp_path / '32'}") == 0
    (lower,), (single,) = losses(tmp_path / "8"), losses(tmp_path / "32")
    assert lower != single and lower[1] == pytest.approx(single[1], rel=0.02)


def test_scales_are_equal_on_all_ranks_and_belong_to_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Tensor]] = []  # on each rank of the last run
    plain = Trainer._whole_model

    def keep(trainer: Trainer) -> GPT:
        seen.append({name: scales.clone() for name, scales in trainer.parallel.state().items()})
        return plain(trainer)

    def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
        return one.keys() == other.keys() and all(
            torch.equal(one[name], other[name]) for name in one
        )

    monkeypatch.setattr(Trainer, "_whole_model", keep)
    asked = "--precision fp8 --save-every 1 --keep 9 --steps 4"
    assert train_on(4, RUN, asked, f"--tp 2 --save {tmp_path / 'a'}") == 0
    assert all(same(one, seen[0]) for one in seen) and len(seen[0]) == 7 * SIZES.layers
    assert all(
        (tensor[:, :4] > 0).all() and (tensor[:, 4:] == 0).all() for tensor in seen[0].values()
    )
    shutil.copytree(
        tmp_path / "a", tmp_path / "b", ignore=lambda _, names: [n for n in names if n[-1] in "34"]
    )
    assert train_on(4, RUN, asked, f"--tp 2 --save {tmp_path / 'b'} --resume") == 0
    assert same_bits(tmp_path / "a" / "step-00000004", tmp_path / "b" / "step-00000004")
    assert same(seen[4], seen[0])
    assert train_on(2, RUN, asked, f"--pp 2 --steps 5 --save {tmp_path / 'b'} --resume") == 0
    # each rank has a stage's
    later = {name: tensor for rank in seen[-2:] for name, tensor in rank.items()}
    assert same(
        {n: tensor[:, 1:] for n, tensor in later.items()},
        {n: tensor[:, :-1] for n, tensor in seen[0].items()},
    )
    assert train_on(1, RUN, f"--steps 5 --save {tmp_path / 'a'} --resume --precision float32") == 0


# ---------------------------------------------------------------- ZeRO++


def test_zeropp_sends_what_its_formula_says_and_less_than_zero_3(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent = {}
    for words in ("", "--zeropp", "--zeropp --accumulate 2"):
        assert train_on(4, RUN, "--zero 3 --clip 0", words) == 0
        out = capsys.readouterr().out
        row = re.search(r"sent by rank 0 +([\d,]+)\n +.* x steps +([\d,]+)", out)
        assert row is not None
        sent[words], formula = (int(number.replace(",", "")) for number in row.groups())
        assert abs(sent[words] - formula) <= 100  # a number for each norm
    assert sent["--zeropp"] < 0.5 * sent[""]


@pytest.mark.parametrize(
    "words",
    [
        "--zero 3 --zeropp",
        "--zero 3 --zeropp --experts 2 --accumulate 2",
        "--compress int8",
        pytest.param("--compress topk:0.1", marks=pytest.mark.soak),
    ],
)
def test_what_is_rounded_on_ranks_along_tp_leaves_their_copies_equal(words: str) -> None:
    """Norms and cut matrices share no block: `train` fails if bits differ between ranks."""
    assert train_on(4, RUN, f"--tp 2 {words}") == 0


def test_zeropp_sends_between_nodes_what_its_formula_says(
    capsys: pytest.CaptureFixture[str], llama: Path
) -> None:
    """Two nodes of two ranks, which the cluster says. FSDP would send each parameter three
    times.
    """
    cluster = replace(Cluster.h100(nodes=2), ranks_per_node=2)
    argv = [*TINY, *shlex.split(f"{RUN} --zero 3 --zeropp --steps 3 --clip 0")]
    assert max(minidist.run(lambda comm: train(argv, comm), 4, cluster=cluster)) == 0
    out = capsys.readouterr().out
    assert "dp=4 (ZeRO++ with nodes of 2)" in out
    row = re.search(r"of these to other nodes +([\d,]+)\n +the formula x steps +([\d,]+)", out)
    assert row is not None
    sent, formula = (int(number.replace(",", "")) for number in row.groups())
    shards = 3 * replace(SIZES, vocabulary=256).parameter_count / 4  # three steps
    # 8 and 4 bits of each number, and scales
    assert sent == formula and 1.5 * shards < sent < 2 * shards


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "ranks, words", [(1, "--lora 4"), (2, "--qlora --zero 3"), (3, "--qlora --zero 2 --precision bfloat16"),
                     (2, "--precision fp8 --zero 3")]
)  # fmt: skip
def test_the_report_sets_what_is_held_beside_the_formula(
    ranks: int, words: str, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_on(ranks, RUN, f"--init {llama} {words}") == 0
    rows = re.findall(
        r"bytes of (\w+) held by rank 0, and by formula +([\d,]+), ([\d,]+)\n",
        capsys.readouterr().out,
    )
    assert [name for name, _, _ in rows] == ["parameters", "gradients", "optimizer"]
    for _, held, formula in rows:
        counted, said = (int(number.replace(",", "")) for number in (held, formula))
        assert counted == pytest.approx(said, abs=400)  # step counts, and scales cut unevenly


def test_adapters_fit_where_training_the_whole_model_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8 billion parameters in 16 bits are 16 GB; with gradients, masters and moments they are
    128.
    """
    config = GPTConfig(128_256, 32, 4096, 32, 8, 14_336)
    run = RunOptions(init="llama", precision="bfloat16")
    monkeypatch.setattr(os, "sysconf", lambda name: 17 * 10**9 if name == "SC_PHYS_PAGES" else 1)
    with pytest.raises(ConfigError, match="need 128 GB"):
        check_memory(Config(run=run), config, 1)
    for options in (replace(run, lora=8), replace(run, qlora=True)):
        check_memory(Config(run=options), config, 1)


def test_zeropp_finds_its_nodes_on_a_real_wire() -> None:
    """There, all ranks have to ask who shares a node; ranks that are threads know it."""
    argv = shlex.split(f"train {' '.join(TINY)} {RUN} --zero 3 --zeropp")
    outcome = mpirun(2, PROGRAM, *argv, env={"MINIDIST_LIMIT": "30"})
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "(ZeRO++ with nodes of 2)" in outcome.stdout

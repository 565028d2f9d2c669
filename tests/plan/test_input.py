"""What the planner is given: files, flags and names that cannot be get one sentence, and none of
them a number.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from minidist.cli.plan.command import main, parser, setup
from minidist.plan.device import UNSAID, Device, Machine, PlanError, checked, machine, ranges, table
from minidist.plan.model import Model, model

CONFIG = {
    "model_type": "mixtral",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
DEVICE: dict[str, Any] = {**table("devices")["h100"], "name": "mine"}
MACHINE: dict[str, Any] = {"gpus": 8, "node": 8, "across": 4e11, "price": 2.0, "device": DEVICE}
QUICK = ["--tokens", "1B", "--batch", "64K", "--sequence", "1024"]
QUICK += [word for axis in ("tp", "cp", "ep", "microbatch") for word in ("--fixed", f"{axis}=1")]
QUICK += ["--fixed", "zero=1", "--fixed", "recompute=none", "--fixed", "schedule=1f1b"]
BAD = ["8", "", "\0", float("nan"), float("inf"), -1, -0.5, 10**30, [8], {"is": 8}, [], 1e300]


def asked(**change: str) -> list[str]:
    """Return a command line that is well-formed but for the changes."""
    words = {"model": "llama-7b", "cluster": "h100:8"} | change
    return [*QUICK, *(f"--{name}={value}" for name, value in words.items())]


def in_toml(value: Any) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {in_toml(each)}" for key, each in value.items()) + "}"
    return str(value) if type(value) is float else json.dumps(value)


def to_toml(tree: dict[str, Any]) -> str:
    return "\n".join(f"{key} = {in_toml(value)}" for key, value in tree.items())


def changed(tree: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    """Return a tree in which one number is a value that it cannot be."""
    name = generator.choice([key for key, value in tree.items() if not isinstance(value, str)])
    if isinstance(tree[name], dict) and generator.random() < 0.8:
        return tree | {name: changed(tree[name], generator)}
    return tree | {name: generator.choice(BAD)}


def broken(text: str, generator: random.Random) -> str:
    """Return a text that is no tree: cut off, of another form, or nested too deeply."""
    other = (
        "",
        "null",
        "[1, 2]",
        '"text"',
        "[" * 100_000,
        '{"a":' * 500 + "1" + "}" * 500,
        "= 1",
        "\ufeff" + text,
    )
    return (
        text[: generator.randrange(len(text) - 2)]
        if generator.random() < 0.5
        else generator.choice(other)
    )


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one sentence with which `plan` refuses a command line."""
    assert main(argv) == 2, argv
    out, err = capsys.readouterr()
    assert not out and err.startswith("plan: ") and err.count("\n") == 1 and len(err) < 600, (
        argv,
        err,
    )
    return err


@pytest.mark.parametrize("form", ("json", "toml", "cluster"))
def test_malformed_files_get_a_sentence(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = random.Random(form)
    for number in range(120):
        path = tmp_path / f"{number}.{'json' if form == 'json' else 'toml'}"
        tree = changed(MACHINE if form == "cluster" else CONFIG, generator)
        text = json.dumps(tree) if form == "json" else to_toml(tree)
        path.write_text(
            broken(text, generator) if generator.random() < 0.3 else text, encoding="utf-8"
        )
        refusal(asked(**{"cluster" if form == "cluster" else "model": str(path)}), capsys)


def test_a_step_of_too_many_sequences_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(["--model", "llama-7b", "--cluster", "h100:8", "--sequence", "1"], capsys)
    assert (
        "--batch 4M holds 4,194,304 sequences of 1 tokens, and a plan is made for 100,000" in said
    )


@pytest.mark.parametrize("name", ("tokens", "batch", "price", "grid", "mtbf"))
def test_malformed_numbers_get_a_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("inf", "-inf", "nan", "-1", "1e999", "1e300"):
        assert f"--{name}" in refusal(asked(**{name: value}), capsys)
    for value in ("²", "", "many", "1.4X", "T", "9" * 5000) if name in ("tokens", "batch") else ():
        refusal(asked(**{name: value}), capsys)


@pytest.mark.parametrize(
    "cluster",
    ("", ":", ":8", "h100", "h100:", "h100:²", "h100:0", "h100:-8", "h100:8.0", "h100:1e2", "h100:12", "h100:9999999",
     "h100:" + "9" * 5000, "h100:8@5e9", "h100:8+a100:8", "h100:8+a100:8@", "h100:8+a100:8@e", "h100:8+a100:8@inf",
     "h100:8+a100:8@0", "h100:8+a100:8@1.2.3", "h100:8+a100:8+v100:8@5e9", "ⅷ:8", "no.toml", "a" * 300 + ".toml"),
)  # fmt: skip
def test_malformed_clusters_get_a_sentence(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal(asked(cluster=cluster), capsys)


@pytest.mark.parametrize(
    "word", ("tp=²", "tp=", "=8", "tp", "tp=1.5", "tp=-1", "tp=" + "9" * 30, "zero=true", "pp=nan")
)
def test_malformed_fields_get_a_sentence(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    refusal([*asked(), "--fixed", word], capsys)


@pytest.mark.parametrize("option", ("model", "cluster", "rows"))
def test_a_pipe_is_refused_and_not_waited_for(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / ("pipe.toml" if option == "cluster" else "pipe.json")
    os.mkfifo(pipe)
    argv = ["check", "--rows", str(pipe)] if option == "rows" else asked(**{option: str(pipe)})
    assert "no regular file" in refusal(argv, capsys)
    assert "cannot be read" in refusal(
        [word.replace(pipe.name, f"not-{pipe.name}") for word in argv], capsys
    )


def test_what_is_well_formed_gets_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, cluster = tmp_path / "config.json", tmp_path / "mine.toml"
    config.write_text(json.dumps(CONFIG))
    cluster.write_text(to_toml(MACHINE))
    assert (
        main([*asked(model=str(config), cluster=str(cluster), mtbf="100"), "--format", "json"]) == 0
    )
    best = json.loads(capsys.readouterr().out)["layouts"][0]
    assert (
        0 < best["mfu"] < 1
        and best["seconds"] > 0
        and all(value >= 0 for value in best["cost"].values())
    )
    expected = Model(4, 256, 8, 1000, kv=4, ffn=512, experts=4, top_k=2)
    assert model(str(config)) == expected and machine(str(cluster)).device.peak == 989e12


# ---------------------------------------------------------------- the table of ranges

IMPOSSIBLE = (
    (MACHINE, "price", -8, "price = -8, which must be from 0 to 1,000,000"),
    (MACHINE, "node", 0, "node = 0, which must be from 1 to 1,000,000"),
    (MACHINE, "across", 0, "across = 0, which must be from 1e\\+06 to"),
    (MACHINE, "nodes", 8, "has an unknown key nodes: did you mean node"),
    (DEVICE, "peak", -1, "peak = -1, which must be from 1e\\+09 to 1e\\+18 FLOP/s"),
    (DEVICE, "peak", 312, "peak = 312, which must be from 1e\\+09 to 1e\\+18 FLOP/s"),
    (DEVICE, "reached", 9, "reached = 9, which must be from 0.01 to 1"),
    (DEVICE, "memory", 80, "memory = 80, which must be from 1e\\+08 to 1e\\+14 bytes"),
    (DEVICE, "watts", -1, "watts = -1, which must be from 0 to"),
    (DEVICE, "generation", "hoper", "generation = 'hoper', which must be one of volta, ampere"),
    (CONFIG, "tie_word_embeddings", "false", "tie_word_embeddings = 'false', which must be true or false"),
    (CONFIG, "n_shared_experts", -9, "n_shared_experts = -9, which must be from 0 to"),
    (CONFIG, "num_key_value_heads", 64, "64 heads of keys and values do not divide 8 heads"),
    (CONFIG, "num_key_value_heads", 3, "3 heads of keys and values do not divide 8 heads"),
    *((CONFIG, name, 0, f"has {name} = 0, which must be at least 1")
      for name in ("num_key_value_heads", "intermediate_size", "head_dim")),
    (CONFIG, "num_attention_heads", 7, "7 heads do not divide hidden=256: change one, or say head_dim"),
    (CONFIG, "num_experts_per_tok", 5, "top_k=5 of 4 experts: choose 1 to 4"),
    (CONFIG, "num_local_experts", 0, "1 shared experts, but no experts"),
    (CONFIG, "num_hidden_layers", 2.5, "num_hidden_layers = 2.5, which must be a whole number"),
    (CONFIG, "vocab_size", 0, "vocab_size = 0, which must be from 1 to"),
    *((CONFIG, "model_type", name, f"model_type = '{name}', which no plan is made for: there are plans for llama")
      for name in ("mamba", "t5", "bert", "rwkv", "qwen2_moe")),
)  # fmt: skip


@pytest.mark.parametrize(("tree", "name", "value", "message"), IMPOSSIBLE)
def test_what_is_impossible_is_refused_by_its_name(
    tree: dict[str, Any], name: str, value: Any, message: str, tmp_path: Path
) -> None:
    read: Callable[[str], object] = model if tree is CONFIG else machine
    tree = tree | {name: value} | ({"n_shared_experts": 1} if name == "num_local_experts" else {})
    path = tmp_path / "file.toml"
    path.write_text(to_toml(MACHINE | {"device": tree} if "peak" in tree else tree))
    with pytest.raises(PlanError, match=message):
        read(str(path))


def test_both_sites_have_the_precision(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*asked(cluster="h100:8+a100:8@5e9"), "--precision", "fp8"]
    assert "a100-80 multiplies no faster in 8 bits" in refusal(words, capsys)


@pytest.mark.parametrize(("batch", "sequences"), [("512K", 512), ("1M", 1024), ("524288", 512)])
def test_batches_are_powers_of_two(batch: str, sequences: int) -> None:
    words = ["--model", "llama-7b", "--cluster", "h100:8", "--batch", batch, "--sequence", "1024"]
    assert setup(parser().parse_args(words)).batch == sequences


def test_failures_that_leave_no_time_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(asked(mtbf="0.01"), capsys)
    assert "a failure every 0.01 h leaves no time to train" in said


def test_every_field_has_a_range_and_every_table_is_inside() -> None:
    """A field that is added without a range would be read unchecked."""
    assert {each.name for each in fields(Model)} == set(ranges("model"))
    assert {each.name for each in fields(Device)} == set(ranges("device"))
    assert {each.name for each in fields(Machine)} - {"device", "slower", "thin"} == set(
        ranges("machine")
    ) - {"inside"}
    for name, device in table("devices").items():
        assert checked({"name": name} | device, "device", UNSAID)
    for name in table("clusters"):
        assert machine(f"{name}:8").gpus == 8

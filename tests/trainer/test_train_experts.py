"""`train` with experts: the serial run's numbers, what a line says, and checkpoints that any layout
reads.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from training import RUN, metrics, short_text, tensors, train_on

from minidist.cli.export import export
from minidist.full.checkpoint.store import complete
from minidist.full.trainer.foreign import load_llama

EXPERTS = "--layers 2 --heads 2 --intermediate 16 --experts 6 --shared-experts 1"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_text(tmp_path_factory.mktemp("text"), 700)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (3, "--ep 3 --balance bias --capacity 1.25 --zero 3"),
        (4, "--ep 2 --tp 2 --sp --balance aux --z-loss 0.001"),
        (4, "--ep 4 --cp 2 --scores sigmoid --raw-weights --top-k 1 --recompute full"),
        (2, "--ep 2 --precision float16 --balance aux --balance-rate 0.1"),
        (2, "--ep 2 --by-length --accumulate 2"),
        (4, "--ep 2 --tp 2 --top-k 6 --precision fp8"),
    ],
)
def test_every_layout_trains_the_parameters_of_the_serial_run(
    ranks: int, words: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_on(ranks, EXPERTS, words, f"--steps 3 --verify --text {text}") == 0
    said = capsys.readouterr().out
    assert re.search(r"same parameters as the serial run +yes", said)
    assert "bytes of tokens sent to experts and back" in said


def test_a_line_says_how_evenly_the_experts_are_loaded(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "metrics.jsonl"
    words = f"--steps 2 --text {text} --metrics {file}"
    assert train_on(2, EXPERTS, "--capacity 1 --ep 2", words) == 0
    lines = metrics(file)
    for line, shown in zip(
        lines,
        re.findall(r"load (\S+)  dropped (\d+)  entropy (\S+)", capsys.readouterr().out),
        strict=True,
    ):
        assert 1 <= line["imbalance"] <= 6 and line["dropped"] > 0 and 0 < line["entropy"] < 1.8
        assert shown == (f"{line['imbalance']:.2f}", f"{line['dropped']}", f"{line['entropy']:.2f}")
    assert train_on(1, f"--steps 1 --text {text} --metrics {file}") == 0
    assert "imbalance" not in metrics(file)[0] and "load" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, "--ep 4"), (2, "--ep 2 --zero 3")),
        ((3, "--ep 3 --zero 1"), (4, "--ep 2 --pp 2 --tp 1")),
        ((4, "--ep 2 --tp 2 --zero 3"), (1, "")),
    ],
)
def test_a_checkpoint_moves_between_any_ep(
    before: tuple[int, str], after: tuple[int, str], text: Path, tmp_path: Path
) -> None:
    """Experts, their moments and the biases of the routers: what comes out is what an undisturbed
    run has.
    """
    options = f"{RUN} {EXPERTS} --balance bias --balance-rate 0.01 --steps 4 --keep 9 --text {text}"
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert train_on(before[0], options, before[1], f"--save {whole}") == 0
    shutil.copytree(whole, moved)
    for step in (3, 4):
        shutil.rmtree(moved / f"step-{step:08d}")
    assert train_on(after[0], options, after[1], f"--save {moved} --resume") == 0
    ours, theirs = (tensors(complete(folder)[-1]) for folder in (moved, whole))
    assert (
        ours.keys() == theirs.keys()
        and theirs["biases/1"].any()
        and "layers.0.mlp.routed.experts.up" in ours
    )
    for name, tensor in theirs.items():
        assert float((ours[name].double() - tensor.double()).abs().max()) <= 1e-9 * max(
            1e-300, float(tensor.abs().max())
        ), name


def test_scales_of_experts_in_8_bits_move_between_any_ep(text: Path, tmp_path: Path) -> None:
    """With the histories of all experts in a checkpoint, of which each rank has some."""
    options = f"{EXPERTS} --top-k 6 --precision fp8 --save-every 1 --keep 9 --text {text}"
    folder = tmp_path / "run"
    assert train_on(4, options, f"--ep 2 --tp 2 --steps 2 --save {folder}") == 0
    before = tensors(complete(folder)[-1])
    names = [name for name in before if name.startswith("scales/") and "experts" in name]
    assert len(names) == 2 * 3
    assert train_on(3, options, f"--ep 3 --steps 3 --save {folder} --resume") == 0
    after = tensors(complete(folder)[-1])
    for name in names:
        assert before[name].shape == (3, 6, 16) and (before[name][..., :2] > 0).all()
        assert torch.equal(after[name][..., 1:], before[name][..., :-1])
        assert (after[name][..., 0] > 0).all()


def test_a_mixtral_is_exported_and_trained_on(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--layers 2 --heads 2 --intermediate 16 --experts 6 --balance aux"
    assert train_on(2, sizes, f"--ep 2 --steps 2 --text {text} --save {tmp_path / 'run'}") == 0
    export(complete(tmp_path / "run")[-1], tmp_path / "mixtral")
    assert json.loads((tmp_path / "mixtral" / "config.json").read_text())["architectures"] == [
        "MixtralForCausalLM"
    ]
    held = tensors(complete(tmp_path / "run")[-1])
    for name, parameter in load_llama(tmp_path / "mixtral").named_parameters():
        assert torch.equal(parameter, held[name]), name
    assert (
        train_on(
            2,
            sizes,
            f"--ep 2 --zero 3 --steps 1 --text {text} --init {tmp_path / 'mixtral'} --capacity 1.5",
        )
        == 0
    )
    words = f"--layers 2 --heads 2 --steps 1 --text {text} --init {tmp_path / 'mixtral'}"
    assert train_on(1, words) == 0  # which takes the experts from the folder
    assert train_on(1, f"{words} --experts 0") == 2
    assert "--experts 6 --top-k 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "words", "sentence"),
    [
        (2, "--ep 2", "--ep 2 is for runs with --experts NUMBER"),
        (
            2,
            "--experts 4 --ep-comm hierarchical",
            "--ep-comm hierarchical is for runs with --ep RANKS",
        ),
        (
            2,
            "--experts 4 --ep 2 --ep-fp8 --verify",
            "--ep-fp8 changes what is sent",
        ),
        (2, "--experts 4 --ep 3", "--ep 3 must divide dp*cp = 2"),
        (2, "--capacity 1.5", "--capacity 1.5 is for a model with experts"),
        (
            2,
            "--experts 4 --cp 2 --by-length",
            "--by-length pads rows to a multiple of 4 tokens on this layout",
        ),
        (
            2,
            "--experts 4 --ep 2 --strategy naive",
            "experts have fewer copies than all else, which naive does not know",
        ),
        (
            2,
            "--experts 4 --ep 2 --ep-comm hierarchical",
            "needs several nodes of as many ranks each",
        ),
    ],
)
def test_a_mistake_is_one_sentence(
    ranks: int, words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_on(ranks, words) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1

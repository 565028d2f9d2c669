"""`--attention-window` in a run: with ranks that share tokens, in measurements and checkpoints, and
in what is exported.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from training import metrics, same_bits, short_text, tensors, train_on

from minidist.cli.export import export
from minidist.full.checkpoint.restore import read_state
from minidist.full.checkpoint.store import complete
from minidist.full.data.options import DataOptions
from minidist.full.data.text import read_corpus
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.full.trainer.foreign import load_llama

RUN = (
    "--layers 2 --dropout 0.2 --steps 3 --eval-every 3 --precision float64 --lr 0.01 --batch 6 "
    "--attention-window 5 --save-every 1 --keep 9"
)


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and a run on one rank."""
    folder = tmp_path_factory.mktemp("window")
    text = short_text(folder, 3000)
    assert train_on(1, RUN, f"--text {text} --held-out 0.2 --save {folder / 'run'}") == 0
    return folder


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, "--cp 2"),
        (2, "--cp 2 --cp-comm all_gather --cp-order contiguous --recompute full"),
        (4, "--cp 2 --tp 2 --sp --cp-comm ulysses --heads 4 --recompute selective"),
        (4, "--cp 2 --pp 2 --microbatches 3 --cp-order striped"),
        (2, "--dp 2 --zero 3 --accumulate 2"),
    ],
)
def test_every_layout_trains_as_one_rank(ranks: int, words: str) -> None:
    assert train_on(ranks, "--layers 2 --steps 2 --attention-window 5 --verify", words) == 0


def test_a_narrow_window_trains_another_model(serial: Path, tmp_path: Path) -> None:
    text = f"--text {serial / 'short.txt'} --held-out 0.2 --save {tmp_path / 'run'}"
    assert train_on(1, RUN.replace("window 5", "window 16"), text) == 0
    wide = metrics(tmp_path / "run" / "metrics.jsonl")
    assert train_on(1, RUN.replace("--attention-window 5", ""), text.replace("/run", "/all")) == 0
    assert [line["loss"] for line in metrics(tmp_path / "all" / "metrics.jsonl")] == [
        line["loss"] for line in wide
    ]
    narrow = metrics(serial / "run" / "metrics.jsonl")
    assert all(one["loss"] != other["loss"] for one, other in zip(wide, narrow, strict=True))


def test_it_is_measured_saved_and_exported_with_its_window(serial: Path, tmp_path: Path) -> None:
    """The measured loss, once more: by the model of the checkpoint, and by that of the exported
    folder.
    """
    checkpoint = complete(serial / "run")[-1]
    assert read_state(checkpoint)["model"]["attention_window"] == 5
    options = DataOptions(text=(str(serial / "short.txt"),), held_out=0.2, sequence=16)
    held_out = read_corpus(options).held_out
    assert held_out is not None
    count = len(held_out)
    tokens = torch.from_numpy(held_out.tokens[: count * 16 + 1].astype(int))
    model = GPT(GPTConfig(**read_state(checkpoint)["model"]), dtype=torch.float64).eval()
    saved = {name: value for name, value in tensors(checkpoint).items() if "/" not in name}
    model.load_state_dict(saved)
    export(checkpoint, tmp_path / "mistral")
    assert json.loads((tmp_path / "mistral" / "config.json").read_text())["sliding_window"] == 5
    measured = metrics(serial / "run" / "metrics.jsonl")[-1]["eval_loss"]
    for found in (model, load_llama(tmp_path / "mistral", torch.float64).eval()):
        loss = cross_entropy_sum(found(tokens[:-1].view(count, 16), Where()), tokens[1:])
        assert float(loss.detach()) / (count * 16) == pytest.approx(measured, rel=1e-9)
    words = f"--steps 1 --text {serial / 'short.txt'} --init {tmp_path / 'mistral'}"
    assert train_on(2, words, "--layers 2 --cp 2 --verify") == 0


def test_a_run_goes_on_with_its_window_and_with_no_other(
    serial: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(serial / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "step-00000003")
    words = f"--text {serial / 'short.txt'} --held-out 0.2 --save {tmp_path / 'run'} --resume"
    assert train_on(1, RUN.replace("window 5", "window 6"), words) == 2
    assert "attention_window" in capsys.readouterr().err
    assert train_on(1, RUN, words) == 0
    assert same_bits(serial / "run" / "step-00000003", tmp_path / "run" / "step-00000003")


def test_an_exported_window_is_that_of_the_folder(
    serial: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(complete(serial / "run")[-1], tmp_path / "mistral")
    words = f"--layers 2 --steps 1 --text {serial / 'short.txt'} --init {tmp_path / 'mistral'}"
    assert train_on(1, words, "--attention-window 6") == 2
    told = capsys.readouterr().err
    assert "is another model than --attention-window 6" in told
    assert "--attention-window 5" in told


def test_a_negative_window_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_on(2, "--steps 1 --attention-window -1") == 2
    assert "--attention-window -1 cannot be: it must be" in capsys.readouterr().err

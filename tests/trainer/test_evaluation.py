"""The loss on held-out text: the same number on every layout, and training does not notice that it
is measured.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from training import metrics, same_bits, short_text, tensors, train_on

from minidist.full.checkpoint.restore import read_state
from minidist.full.data.options import DataOptions
from minidist.full.data.text import read_corpus
from minidist.full.model import GPT, GPTConfig

RUN = (
    "--layers 4 --dropout 0.2 --steps 4 --eval-every 3 --precision float64 --lr 0.01 --batch "
    "6 --save-every 1 --keep 9"
)
KINDS = {
    "dense": "--tied",
    "mixture": "--experts 4 --capacity 1.2 --balance bias --balance-rate 0.1",
}


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and a run of each kind on one rank."""
    folder = tmp_path_factory.mktemp("serial")
    text = short_text(folder, 3000)
    for kind, words in KINDS.items():
        assert train_on(1, RUN, words, f"--text {text} --held-out 0.2 --save {folder / kind}") == 0
    return folder


def measured(folder: Path) -> dict[float, float]:
    """Return the loss on held-out text by the step after which it was measured."""
    lines = metrics(folder / "metrics.jsonl")
    return {line["step"]: line["eval_loss"] for line in lines if line["eval_loss"] is not None}


def test_it_is_the_loss_of_the_model_that_was_saved(serial: Path) -> None:
    """Computed once more from the checkpoint, in one batch: nothing that trains has a part in
    it.
    """
    found = measured(serial / "dense")
    assert list(found) == [3, 4]
    held_out = read_corpus(
        DataOptions(text=(str(serial / "short.txt"),), held_out=0.2, sequence=16)
    ).held_out
    assert held_out is not None and len(held_out) == 37
    rows = torch.from_numpy(held_out.tokens[: 37 * 16 + 1].astype(int))
    inputs, targets = rows[:-1].view(37, 16), rows[1:]
    for step, loss in found.items():
        checkpoint = serial / "dense" / f"step-{int(step):08d}"
        model = GPT(GPTConfig(**read_state(checkpoint)["model"]), dtype=torch.float64).eval()
        weights = {name: value for name, value in tensors(checkpoint).items() if "/" not in name}
        model.load_state_dict(weights, strict=False)  # the head is tied
        model.tie()
        model.requires_grad_(False)
        expected = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets)
        assert loss == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    ("ranks", "kind", "words"),
    [
        pytest.param(2, "dense", "--strategy server", marks=pytest.mark.soak),
        pytest.param(3, "dense", "--accumulate 2", marks=pytest.mark.soak),
        (2, "dense", "--zero 2 --recompute full"),
        (4, "dense", "--zero 3 --hsdp 2"),
        pytest.param(4, "dense", "--tp 2 --sp --zero 1", marks=pytest.mark.soak),
        pytest.param(2, "dense", "--cp 2 --zero 3", marks=pytest.mark.soak),
        (2, "dense", "--cp 2 --cp-comm ulysses --cp-order contiguous"),
        pytest.param(
            4, "dense", "--pp 2 --schedule zb-h1 --microbatches 3", marks=pytest.mark.soak
        ),
        (4, "dense", "--pp 2 --tp 2 --sp --schedule interleaved --microbatches 4"),
        pytest.param(
            2, "dense", "--pp 2 --schedule gpipe --microbatches 5 --zero 0", marks=pytest.mark.soak
        ),
        pytest.param(2, "mixture", "--zero 3", marks=pytest.mark.soak),
        pytest.param(4, "mixture", "--ep 2 --tp 2", marks=pytest.mark.soak),
        (4, "mixture", "--cp 2 --ep 2 --ep-comm direct"),
        pytest.param(2, "mixture", "--pp 2 --microbatches 3", marks=pytest.mark.soak),
    ],
)
def test_every_layout_measures_the_serial_number_and_trains_as_if_it_did_not(
    ranks: int, kind: str, words: str, serial: Path, tmp_path: Path
) -> None:
    words = f"{RUN} {KINDS[kind]} --text {serial / 'short.txt'} --held-out 0.2 {words}"
    assert train_on(ranks, words, f"--save {tmp_path / 'with'}") == 0
    ours, theirs = measured(tmp_path / "with"), measured(serial / kind)
    assert ours.keys() == theirs.keys()
    assert [ours[step] for step in theirs] == pytest.approx([*theirs.values()], rel=1e-11)
    assert (
        train_on(ranks, words.replace("--eval-every 3", ""), f"--save {tmp_path / 'without'}") == 0
    )
    assert measured(tmp_path / "without") == {}
    assert same_bits(tmp_path / "with" / "step-00000004", tmp_path / "without" / "step-00000004")


def test_a_resumed_run_measures_what_the_whole_run_did(serial: Path, tmp_path: Path) -> None:
    """Also where documents of any length are measured, from files of their own, and only the first
    batches of them.
    """
    (tmp_path / "other.txt").write_text("\n\n".join("abc " * count for count in range(1, 40)))
    words = (
        f"{RUN} --by-length --text {serial / 'short.txt'} --eval-text {tmp_path / 'other.txt'} "
        "--eval-batches 2"
    )
    assert train_on(1, words, f"--save {tmp_path / 'whole'}") == 0
    assert train_on(2, words, f"--save {tmp_path / 'parts'}") == 0
    shutil.rmtree(tmp_path / "parts" / "step-00000004")
    shutil.rmtree(tmp_path / "parts" / "step-00000003")
    assert train_on(3, words, f"--resume --zero 1 --save {tmp_path / 'parts'}") == 0
    whole, parts = measured(tmp_path / "whole"), measured(tmp_path / "parts")
    assert list(whole) == list(parts) == [3, 4] and [*parts.values()] == pytest.approx(
        [*whole.values()], rel=1e-11
    )


def test_held_out_text_that_is_too_short_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_on(2, f"--steps 2 --eval-every 1 --text {short_text(tmp_path, 300)}") == 2
    assert capsys.readouterr().err == (
        "minidist train: --eval-every 1: the held-out text is too short for a sequence of 16 "
        "tokens: use --eval-text FILE, or a larger --held-out\n"
    )


def test_text_to_measure_on_that_nobody_would_measure_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_on(2, f"--steps 2 --eval-text {short_text(tmp_path, 300)}") == 2
    assert capsys.readouterr().err == (
        f"minidist train: --eval-text {short_text(tmp_path, 300)} is for runs with --eval-every STEPS: "
        "add that, or leave --eval-text out\n"
    )

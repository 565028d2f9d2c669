"""What the planner is told of a run of `train`, and what it predicts for it."""

import json
from pathlib import Path

import pytest

import minidist
from minidist.cli.plan.here import (
    LAYOUTS,
    SIZES,
    known_device,
    machine_here,
    predicted_seconds,
    run_of,
)
from minidist.cli.train import train
from minidist.full.comm import Communicator
from minidist.full.data.text import read_corpus
from minidist.full.mesh import Mesh
from minidist.full.trainer.checked import check_run, layout_of
from minidist.full.trainer.loop import Trainer
from minidist.full.trainer.start import start_of
from minidist.further import parse
from minidist.plan.traffic import bytes_sent

# one axis each, one composed; the planner's bytes of all others are counted on `meta`
OFTEN = ("--dp 2 --zero 3", "--dp 2 --tp 2 --sp", "--dp 2 --pp 2 --microbatches 8")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        *(
            pytest.param(ranks, words, marks=[pytest.mark.soak] * (words not in OFTEN))
            for ranks in LAYOUTS
            for words in LAYOUTS[ranks]
        ),
        (2, "--cp 2 --attention-window 9"),
    ],
)
def test_a_run_sends_what_is_predicted_for_it(ranks: int, words: str) -> None:
    config = parse(
        [*SIZES.split(), *words.split(), "--steps", "2", "--layers", "2", "--hidden", "64"]
    )
    tokenizer, samples, *_ = read_corpus(config.data)

    def program(comm: Communicator) -> tuple[int, float]:
        run = check_run(config, Mesh(comm.split(0), layout_of(config, ranks)), tokenizer.vocabulary)
        planned = run_of(run, machine_here(comm, run))
        outcome = Trainer(run, start_of(run, samples)).run()
        return sum(int(both.sum()) for both in outcome.sent.values()), bytes_sent(planned)

    found = minidist.run(program, ranks)
    numbers = sum(counted for counted, _ in found) - 2 * sum(found[0][1].values())  # two steps
    assert 0 <= numbers <= 2 * 64  # the norm of the gradients, along each axis


@pytest.mark.parametrize(
    ("said", "name"),
    (
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GeForce RTX 4090", ""),
    ),
)
def test_a_gpu_is_known_by_its_name(said: str, name: str) -> None:
    assert known_device(said) == name


@pytest.mark.parametrize(
    "words", ("--recompute sqrt", "--pp 2 --schedule naive", "--offload memory", "--strategy naive")
)
def test_nothing_is_predicted_for_what_the_planner_does_not_know(words: str) -> None:
    config = parse([*words.split(), "--peak-tflops", "1"])

    def program(comm: Communicator) -> float | None:
        return predicted_seconds(check_run(config, Mesh(comm, layout_of(config, 2)), 256))

    assert minidist.run(program, 2) == [None, None]


def test_utilisation_stands_beside_the_planners(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "metrics.jsonl"
    argv = [
        *["--dp", "2", "--layers", "1", "--steps", "2", "--peak-tflops", "1", "--metrics"],
        str(file),
    ]
    assert max(minidist.run(lambda comm: train(argv, comm), 2)) == 0
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(0 < step["planned_utilisation"] < 1 and step["utilisation"] > 0 for step in steps)
    assert f"(plan {steps[0]['planned_utilisation']:.1%})" in capsys.readouterr().out

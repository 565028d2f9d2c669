"""What the planner is told of a run of `train`, and what it predicts for it."""

import pytest

import minidist
from minidist.cli.plan.here import (
    LAYOUTS,
    SIZES,
    machine_here,
    run_of,
)
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

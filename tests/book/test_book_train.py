"""Training on every mesh of up to 8 ranks equals the serial run, and sends what the formulas say."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minidist import pipeline
from minidist.comm import Communicator
from minidist.pipeline import SCHEDULES, bubble, check, draw, in_flight, one_f_one_b
from minidist.threads import run
from minidist.train import Options, Run, train, verify

SMALL = Options(layers=4, hidden=16, heads=4, kv_heads=4, sequence=8, batch=8, steps=2)
MESHES = [
    (dp, tp, pp, zero)
    for dp, tp, pp, zero in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (0, 1, 2))
    if dp * tp * pp <= 8 and not (zero == 2 and pp > 1) and not (zero and dp == 1)
]


def trained(options: Options, ranks: int) -> tuple[dict[str, Tensor], str]:
    """Return the whole parameters, and what was sent next to the formula."""

    def program(comm: Communicator) -> tuple[dict[str, Tensor], str]:
        torch.set_num_threads(1)
        trainer = Run(options.on(comm.size), comm)
        while trainer.steps_done < options.steps:
            trainer.step()
        return trainer.weights(), trainer.sent()

    return run(program, ranks)[0]


def is_right(options: Options, ranks: int) -> None:
    weights, sent = trained(options, ranks)
    verify(options, weights)
    for found, formula in re.findall(r"([\d,]+) \(formula ([\d,]+)\)", sent):
        assert found == formula, sent


@pytest.mark.parametrize(("dp", "tp", "pp", "zero"), MESHES)
def test_every_product(dp: int, tp: int, pp: int, zero: int) -> None:
    is_right(replace(SMALL, dp=dp, tp=tp, pp=pp, zero=zero, tied=dp % 2 == 0), dp * tp * pp)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {"zero": 3, "microbatches": 2}),
        (4, {"zero": 3, "tp": 2, "sp": True, "recompute": True}),
        (4, {"tp": 2, "pp": 2, "sp": True, "recompute": True, "tied": True}),
        (4, {"cp": 2, "zero": 1, "recompute": True, "kv_heads": 2}),
        (3, {"pp": 3, "schedule": "gpipe", "microbatches": 4}),
        (2, {"zero": 2, "microbatches": 4}),
        (3, {"dp": 3, "batch": 6, "heads": 2, "kv_heads": 1}),
        (2, {"dp": 2, "precision": "float32"}),
    ],
    ids=str,
)
def test_what_else_there_is(ranks: int, changes: dict[str, object]) -> None:
    is_right(replace(SMALL, **changes), ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_sixteen_bits_train(precision: str) -> None:
    options = replace(SMALL, precision=precision, dp=2, tp=2, zero=1)
    weights, _ = trained(options, 4)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}  # the masters
    verify(options, weights)


def test_a_run_goes_on_on_another_layout(tmp_path: Path) -> None:
    folder = str(tmp_path)
    whole = run(lambda comm: train(replace(SMALL, steps=4), comm, talk=False), 1)[0]
    first = replace(SMALL, dp=2, tp=2, zero=1, save=folder)
    run(lambda comm: train(first, comm, talk=False), 4)
    for ranks, changes in ((2, {"pp": 2}), (2, {"zero": 3}), (4, {"tp": 4}), (1, {})):
        second = replace(SMALL, steps=4, resume=folder, **changes)  # type: ignore[arg-type]
        found = run(lambda comm, second=second: train(second, comm, talk=False), ranks)[0]
        for name, tensor in whole.items():
            assert (tensor - found[name]).abs().max() <= 1e-9 * tensor.abs().max(), (changes, name)


@pytest.mark.parametrize(
    ("ranks", "changes", "words"),
    [
        (3, {"dp": 2}, r"dp\*pp\*cp\*tp = 2, but 3 ranks were started"),
        (2, {"pp": 2, "zero": 3}, "use --zero 1"),
        (2, {"dp": 2, "batch": 3}, "--batch 3 does not divide by"),
        (2, {"tp": 2, "heads": 1}, "do not divide by --tp 2"),
        (2, {"tp": 2, "sp": True, "sequence": 7}, "7 tokens do not divide by --tp 2"),
        (4, {"cp": 2, "tp": 2}, "leave out --tp and --pp"),
    ],
)
def test_what_does_not_fit_is_said_before_any_work(
    ranks: int, changes: dict[str, object], words: str
) -> None:
    options = replace(SMALL, **changes)  # type: ignore[arg-type]
    if changes.get("heads") == 1:
        options = replace(options, kv_heads=1)
    with pytest.raises(ValueError, match=words):
        run(lambda comm: train(options, comm, talk=False), ranks)


def test_a_schedule_is_checked_measured_and_drawn() -> None:
    for name, (ranks, microbatches) in itertools.product(SCHEDULES, ((1, 3), (4, 8), (4, 2))):
        schedule = SCHEDULES[name](ranks, microbatches)
        check(schedule)
        assert bubble(schedule) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert in_flight(one_f_one_b(4, 8)) == [4, 3, 2, 1]
    assert in_flight(SCHEDULES["gpipe"](4, 8)) == [8] * 4
    assert draw(one_f_one_b(2, 2)).splitlines() == [
        "rank 0    F0 F1       B0       B1",
        "rank 1       F0 B0    F1 B1",
    ]
    stuck = one_f_one_b(3, 3)
    stuck[2][:2] = stuck[2][1::-1]
    with pytest.raises(ValueError, match="cannot go on: rank 0 at B0, rank 1 at B0, rank 2 at B0"):
        check(stuck)
    swapped = SCHEDULES["gpipe"](2, 3)
    swapped[1] = [*swapped[1][1::-1], *swapped[1][2:]]
    with pytest.raises(ValueError, match=r"rank 1 must run .* in the order of rank 0"):
        check(swapped)
    assert "F9  F10 F11 B0" in draw(SCHEDULES["gpipe"](1, 12))


def test_the_picture_at_the_head_of_the_page_is_drawn_by_it() -> None:
    for line in draw(one_f_one_b(4, 4)).splitlines():
        assert line in (pipeline.__doc__ or "")


def test_a_checkpoint_without_one_of_its_files_is_refused(tmp_path: Path) -> None:
    options = replace(SMALL, tp=2, steps=1, save=str(tmp_path))
    run(lambda comm: train(options, comm, talk=False), 2)
    (lost,) = tmp_path.glob("step-*/rank-0001.pt")
    lost.unlink()
    again = replace(SMALL, resume=str(tmp_path))
    with pytest.raises(ValueError, match=r"has 1 of 2 files rank-\*\.pt"):
        run(lambda comm: train(again, comm, talk=False), 1)

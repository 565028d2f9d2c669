"""Checkpoints of meshes: whatever layout goes on from them ends with the numbers of the run that
nothing disturbed.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from training import RUN, losses, same_bits, short_text, tensors, train_on

from minidist.full.checkpoint import store
from minidist.full.checkpoint.pieces import Piece
from minidist.full.checkpoint.store import CheckpointError, Written, complete
from minidist.full.trainer.loop import Trainer

STEPS = 6
MESH = f"{RUN} --layers 4 --heads 4 --keep 9"
LAST = f"step-{STEPS:08d}"
Layout: TypeAlias = tuple[int, str]
"""How many ranks, and the options that spread the model over them."""
Finished: TypeAlias = Callable[[Layout, str], Path]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # 41 samples: an epoch ends within 6 steps of 8
    return short_text(tmp_path_factory.mktemp("text"), 700)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Finished:
    """Return what gives the folder of a whole run, which is made once."""

    @cache
    def run(layout: Layout, options: str) -> Path:
        folder = tmp_path_factory.mktemp("finished") / "run"
        assert go_on(layout, options, folder, text) == 0
        return folder

    return run


def go_on(layout: Layout, options: str, folder: Path, text: Path) -> int:
    """Train up to the last step, from the newest checkpoint if there is one; return the exit
    status.
    """
    ranks, words = layout
    resume = "--resume" if complete(folder) else ""
    return train_on(
        ranks, MESH, options, words, f"--steps {STEPS} --text {text} --save {folder} {resume}"
    )


def interrupted(folder: Path, there: Path) -> Path:
    """Copy a finished run as if it had been killed in its fourth step."""
    shutil.copytree(folder, there)
    for step in range(4, STEPS + 1):
        shutil.rmtree(there / f"step-{step:08d}")
    return there


def worst(ours: Path, theirs: Path) -> float:
    """Return the largest max|a - b| / max|b| of all tensors of two checkpoints."""
    a, b = tensors(ours), tensors(theirs)
    assert a.keys() == b.keys()
    return max(
        float((a[name].double() - b[name]).abs().max() / b[name].double().abs().max()) for name in b
    )


# ---------------------------------------------------------------- from one layout to another


@pytest.mark.parametrize("tied", ["--tied", pytest.param("--no-tied", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((4, ""), (4, "--tp 2 --pp 2"), marks=pytest.mark.soak),
        pytest.param((4, "--zero 3"), (2, "--pp 2"), marks=pytest.mark.soak),
        ((4, "--pp 2 --tp 2 --sp"), (4, "--zero 3 --hsdp 2")),
        pytest.param((2, "--pp 2 --schedule zb-v"), (4, "--cp 2 --zero 1"), marks=pytest.mark.soak),
        ((4, "--cp 4 --zero 3"), (4, "--cp 2 --tp 2 --cp-comm ulysses")),
        pytest.param((4, "--pp 4"), (4, "--tp 2 --zero 2"), marks=pytest.mark.soak),
        ((4, "--pp 2 --zero 1 --schedule zb-h1"), (3, "--pp 3")),
        pytest.param((2, "--tp 2 --sp"), (1, ""), marks=pytest.mark.soak),
        ((1, ""), (8, "--pp 2 --tp 2 --zero 3")),
    ],
    ids=str,
)
def test_resuming_on_another_layout(
    before: Layout, after: Layout, tied: str, finished: Finished, text: Path, tmp_path: Path
) -> None:
    """Dropout, the position in the text over the end of its epoch, both moments: all that a number
    can depend on.
    """
    calm = finished(before, tied)
    folder = interrupted(calm, tmp_path / "run")
    assert go_on(after, tied, folder, text) == 0
    assert worst(folder / LAST, calm / LAST) <= 1e-9
    assert [step for step, _ in losses(folder / "metrics.jsonl")] == list(range(1, STEPS + 1))
    for (_, ours), (_, theirs) in zip(
        losses(folder / "metrics.jsonl"), losses(calm / "metrics.jsonl"), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_eight_stages_on_four_ranks_go_on_as_two_replicas(
    finished: Finished, text: Path, tmp_path: Path
) -> None:
    options = "--layers 8 --tied"
    calm = finished((4, "--pp 4 --schedule zb-v"), options)
    folder = interrupted(calm, tmp_path / "run")
    assert go_on((2, "--dp 2 --zero 1"), options, folder, text) == 0
    assert worst(folder / LAST, calm / LAST) <= 1e-9


@pytest.mark.parametrize(
    "layout",
    [
        (4, "--tp 2 --pp 2 --sp"),
        pytest.param((4, "--pp 2 --zero 3"), marks=pytest.mark.soak),
        pytest.param((2, "--pp 2 --schedule zb-v"), marks=pytest.mark.soak),
        (4, "--tp 2 --compress powersgd:2"),
        (4, "--tp 2 --compress 1bit"),
        pytest.param((4, "--tp 2 --compress int8"), marks=pytest.mark.soak),
        pytest.param((4, "--tp 2 --compress topk:0.1"), marks=pytest.mark.soak),
        pytest.param((2, "--compress topk:0.1:0.5"), marks=pytest.mark.soak),
        pytest.param((3, "--compress 1bit"), marks=pytest.mark.soak),
        (4, "--pp 2 --zero 1 --schedule zb-h1 --offload memory"),
        pytest.param((4, "--tp 2 --zero 2 --precision bfloat16"), marks=pytest.mark.soak),
        pytest.param((4, "--pp 2 --tp 2 --precision bfloat16"), marks=pytest.mark.soak),
        pytest.param((4, "--pp 2 --zero 1 --precision float16"), marks=pytest.mark.soak),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", ["--tied", pytest.param("--no-tied", marks=pytest.mark.soak)])
def test_the_same_layout_ends_with_the_same_bits(
    layout: Layout, tied: str, finished: Finished, text: Path, tmp_path: Path
) -> None:
    calm = finished(layout, tied)
    folder = interrupted(calm, tmp_path / "run")
    assert go_on(layout, tied, folder, text) == 0
    assert same_bits(folder / LAST, calm / LAST)
    assert losses(folder / "metrics.jsonl") == losses(calm / "metrics.jsonl")


@pytest.mark.parametrize(
    "layout", [(2, ""), (8, ""), pytest.param((4, "--tp 2"), marks=pytest.mark.soak)], ids=str
)
def test_what_other_ranks_kept_back_is_not_lost(
    layout: Layout, finished: Finished, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fewer ranks some take over what several had, on more some begin with nothing."""
    options = "--compress powersgd:2"
    folder = interrupted(finished((4, ""), options), tmp_path / "run")
    saved = tensors(folder / "step-00000003")
    sums: dict[str, torch.Tensor] = {}
    lock, spread = threading.Lock(), Trainer.spread

    def recorded(self: Trainer) -> object:
        result = spread(self)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for each in self.parallel.replica.remembered():
            if self.mesh.tp.size > 1 or each.word != "kept back":
                continue  # each has a block
            with lock:
                sums[names[each.parameter]] = sums.get(names[each.parameter], 0) + each.tensor
        return result

    monkeypatch.setattr(Trainer, "spread", recorded)
    assert go_on(layout, options, folder, text) == 0
    for name, total in sums.items():
        every = [
            tensor
            for full, tensor in saved.items()
            if full.startswith("remembered/kept back/") and full.endswith(f"/{name}")
        ]
        assert len(every) == 4
        expected = torch.stack(every).sum(0).view_as(total)
        assert torch.allclose(total, expected, rtol=0, atol=1e-15)
    assert bool(sums) == (layout[1] == "")


def test_masters_in_32_bits_go_to_another_layout(
    finished: Finished, text: Path, tmp_path: Path
) -> None:
    """Going on at a rate of almost nothing, they stay what they were; made anew they would be off
    by a rounding.
    """
    options = "--precision bfloat16 --tied"
    calm = finished((4, "--zero 1"), options)
    folder = interrupted(calm, tmp_path / "run")
    assert go_on((4, "--pp 2 --tp 2"), f"{options} --lr 1e-12", folder, text) == 0
    before, after = tensors(folder / "step-00000003"), tensors(folder / LAST)
    masters = [name for name in before if name.endswith("/master")]
    assert masters and before.keys() == after.keys()
    for name in masters:
        assert before[name].dtype == torch.float32
        assert (after[name] - before[name]).abs().max() <= 1e-9, name
    rounding = [
        float((before[name] - before[name.removesuffix("/master")]).abs().max()) for name in masters
    ]
    assert min(rounding) > 1e-5, "a loss would go unnoticed"


def test_the_loss_scale_goes_to_another_layout(
    finished: Finished, text: Path, tmp_path: Path
) -> None:
    """The scale starts at 65536, and has been halved by the time of the interruption."""
    options = "--precision float16 --lr 0.001"
    calm = finished((4, "--pp 2 --zero 1"), options)
    folder = interrupted(calm, tmp_path / "run")
    assert go_on((4, "--tp 2"), options, folder, text) == 0
    ours, theirs = (
        json.loads((run / LAST / "state.json").read_text())["scaler"] for run in (folder, calm)
    )
    assert ours == theirs


def test_another_layout_is_no_change_to_be_named(
    finished: Finished, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = interrupted(finished((4, ""), "--tied"), tmp_path / "run")
    capsys.readouterr()
    assert go_on((2, "--pp 2"), "--tied", folder, text) == 0
    assert capsys.readouterr().out.splitlines()[1] == "resumed after step 3"


def test_a_mistake_leaves_the_checkpoints_alone(
    finished: Finished, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = interrupted(finished((4, ""), "--tied"), tmp_path / "run")
    before = sorted(folder.rglob("*"))
    assert go_on((4, "--pp 4 --schedule zb-v"), "--tied", folder, text) == 2
    assert "8 stages need at least as many layers" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_what_is_kept(text: Path, tmp_path: Path) -> None:
    words = f"--steps 8 --pp 2 --keep 2 --keep-every 3 --text {text} --save {tmp_path}"
    assert train_on(4, RUN, "--layers 2", words) == 0
    assert [store.step_of(path) for path in complete(tmp_path)] == [3, 6, 7, 8]
    assert not list(tmp_path.glob(".unfinished*"))


# ---------------------------------------------------------------- writing while training goes on


class Slow:
    """In place of `store.write_shard`: the first checkpoint is not written before training has
    begun some step.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: int, rank: int) -> None:
        self.until, self.rank, self.write, self.take = until, rank, store.write_shard, Trainer.step
        self.begun, self.events, self.first = threading.Event(), [], True
        slow = self

        def step(trainer: Trainer, number: int, *rest: object) -> tuple[float, float]:
            if trainer.comm.rank == slow.rank:
                slow.events.append(f"step {number + 1}")
                if number + 1 == slow.until:
                    slow.begun.set()
            return slow.take(trainer, number, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(Trainer, "step", step)
        monkeypatch.setattr(store, "write_shard", self.write_shard)

    def write_shard(self, unfinished: Path, rank: int, pieces: Sequence[Piece]) -> Written:
        """Write, late."""
        if rank != self.rank:
            return self.write(unfinished, rank, pieces)
        number = int(unfinished.name.rpartition("-")[2])
        self.events.append(f"begin to write {number}")
        if self.first:
            self.first = False
            assert self.begun.wait(30), "training stood still while a checkpoint was being written"
            time.sleep(0.3)
        written = self.write(unfinished, rank, pieces)
        self.events.append(f"wrote {number}")
        return written


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.soak), 3])
def test_training_goes_on_and_the_next_checkpoint_waits(
    rank: int, finished: Finished, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 3, 4 and 5 are taken while the checkpoint of step 2 is written: with the numbers of
    step 2 all the same.
    """
    layout = (4, "--pp 2 --tp 2")
    calm = finished(layout, "")
    slow = Slow(monkeypatch, until=4, rank=rank)
    words = f"--save-every 2 --steps {STEPS} --text {text} --save {tmp_path}"
    assert train_on(layout[0], MESH.replace("--save-every 1", ""), layout[1], words) == 0
    order = {event: at for at, event in enumerate(slow.events)}
    assert (
        order["begin to write 2"] < order["step 4"] < order["wrote 2"] < order["begin to write 4"]
    )
    assert order["wrote 2"] < order["step 5"], (
        "the checkpoint of step 4 was copied before that of step 2 was written"
    )
    for step in (2, 4, 6):
        assert same_bits(tmp_path / f"step-{step:08d}", calm / f"step-{step:08d}")


@pytest.mark.parametrize(
    ("at", "failing"),
    [
        (4, 3),
        (STEPS, 0),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in ((4, 0), (4, 1), (STEPS, 1), (STEPS, 3))
        ),
    ],
)
def test_what_goes_wrong_in_the_background_reaches_all_ranks(
    failing: int,
    at: int,
    finished: Finished,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One sentence and status 2; what was written before is untouched, and the run can go on from
    it.
    """
    layout, write = (4, "--pp 2 --zero 1"), store.write_shard
    calm = finished(layout, "")
    folder = interrupted(calm, tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.glob("step*/*")}

    def full(unfinished: Path, rank: int, pieces: Sequence[Piece]) -> Written:
        if rank == failing and unfinished.name.endswith(f"{at:08d}"):
            raise CheckpointError(f"the disk of rank {rank} is full")
        return write(unfinished, rank, pieces)

    monkeypatch.setattr(store, "write_shard", full)
    capsys.readouterr()
    assert go_on(layout, "", folder, text) == 2
    assert capsys.readouterr().err == f"minidist train: the disk of rank {failing} is full\n"
    assert {path: path.read_bytes() for path in before} == before
    assert complete(folder)[-1].name == f"step-{at - 1:08d}" and not list(
        folder.glob(".unfinished*")
    )
    monkeypatch.undo()
    assert go_on(layout, "", folder, text) == 0
    assert same_bits(folder / LAST, calm / LAST)


@pytest.mark.parametrize("failing", [0, 3])
def test_a_bug_in_the_background_ends_the_job(
    failing: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait for a message of the rank that has none to give."""
    write = store.write_shard

    def broken(unfinished: Path, rank: int, pieces: Sequence[Piece]) -> Written:
        if rank == failing:
            raise ZeroDivisionError(f"a bug of rank {rank}")
        return write(unfinished, rank, pieces)

    monkeypatch.setattr(store, "write_shard", broken)
    with pytest.raises(ZeroDivisionError, match=f"a bug of rank {failing}"):
        go_on((4, "--pp 2 --tp 2"), "", tmp_path, text)
    assert not complete(tmp_path)

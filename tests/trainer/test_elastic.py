"""A run that loses ranks at any of their events is the run that loses none."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from elastic import Events, threads_left, train_job
from training import TINY, losses, short_text, tensors

from minidist.full.checkpoint.store import newest
from minidist.full.comm.membership.agreement import Wanted
from minidist.full.trainer.config import ConfigError
from minidist.full.trainer.elastic.carry import Carrier, Standing
from minidist.full.trainer.elastic.elastic_run import accumulating, on_ranks_of
from minidist.full.trainer.metrics import StepMetrics
from minidist.further import parse

STEPS = 3
WORDS = [*TINY, "--precision", "float64", "--steps", str(STEPS)]
LAYOUTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "dp, on what is left": ([], {"ranks": 2}),
    "dp, with a spare": ([], {"ranks": 2, "spares": 1}),
    "pp, a replica is lost": (["--pp", "2", "--layers", "2"], {"ranks": 4, "together": 2}),
    "tp, with a spare replica": (["--tp", "2"], {"ranks": 4, "spares": 2, "together": 2}),
    "hsdp, a group is lost": (["--zero", "3", "--hsdp", "2"], {"ranks": 4, "together": 2}),
}


class Job:
    """Runs one layout again and again, each time with other deaths."""

    def __init__(self, home: Path, layout: str) -> None:
        self.home, (self.more, self.options) = home, LAYOUTS[layout]
        self.text, self.number = str(short_text(home, 700)), 0
        self.calm = self.run({})

    def run(self, deaths: dict[int, Events], *more: str) -> tuple[Path, str]:
        """Return the folder of a run, and what it printed."""
        folder = self.home / str(self.number)
        self.number += 1
        words = [*WORDS, "--text", self.text, "--save", str(folder), *self.more, *more]
        before = set(threading.enumerate())
        statuses, printed = train_job(words, deaths=deaths, **self.options)
        assert {0} <= set(statuses) <= {0, None}, printed
        assert threads_left(before) == []
        return folder, printed

    def check(self, deaths: dict[int, Events], *more: str) -> str:
        """Compare a run that loses members with the one that loses none."""
        folder, printed = self.run(deaths, *more)
        (steps, found), (_, expected) = (
            zip(*losses(run / "metrics.jsonl"), strict=True) for run in (folder, self.calm[0])
        )
        assert steps == tuple(range(1, STEPS + 1)), "each step is recorded once"
        assert found == pytest.approx(expected, rel=1e-9)
        ours, theirs = (tensors(newest(run)) for run in (folder, self.calm[0]))
        for name, tensor in theirs.items():
            assert torch.allclose(ours[name], tensor, rtol=1e-9, atol=1e-12), name
        return printed

    def check_nothing_is_lost(self, deaths: dict[int, Events], *more: str) -> None:
        """Check besides that what rank 0 has said to be done, is done in the view that follows."""
        told = 0
        for line in self.check(deaths, *more).splitlines():
            if found := re.match(r"step (\d)/", line):
                told = int(found[1])
            elif line.startswith("view") and told:
                assert "go on after step" in line or "goes on after step" in line, line
                assert int(line.split()[-1]) >= told, line

    def events(self, victim: int) -> int:
        """Return how many events a member has when nobody dies."""
        counted = Events(-1)
        self.run({victim: counted})
        return counted.count


@pytest.mark.parametrize(
    ("layout", "victim", "every", "delay"),
    [
        ("dp, on what is left", 0, 5, 0.0),
        ("dp, with a spare", 1, 5, 0.0),
        ("pp, a replica is lost", 3, 14, 0.02),
        ("tp, with a spare replica", 2, 29, 0.0),
        ("hsdp, a group is lost", 1, 23, 0.02),
    ],
)
def test_a_member_may_die_at_any_event(
    tmp_path: Path, layout: str, victim: int, every: int, delay: float
) -> None:
    job = Job(tmp_path, layout)
    for at in range(1, job.events(victim) + 1, every):
        job.check_nothing_is_lost({victim: Events(at, delay)})


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_member_may_die_at_each_event(tmp_path: Path, layout: str) -> None:
    job = Job(tmp_path, layout)
    for victim in range(job.options["ranks"]):
        for at in range(1, job.events(victim) + 1):
            for delay in (0.0, 0.02):
                job.check_nothing_is_lost({victim: Events(at, delay)})


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ("--cp 2", {"ranks": 4, "together": 2, "spares": 2}),
        ("--strategy naive", {"ranks": 2, "spares": 1}),
        ("--strategy server", {"ranks": 2, "spares": 1}),
        ("--accumulate 2 --dropout 0.1 --tied", {"ranks": 2}),
        ("--recompute full --by-length", {"ranks": 2, "spares": 1}),
        ("--experts 4", {"ranks": 2, "spares": 1}),
        ("--tp 2 --sp", {"ranks": 4, "together": 2}),
        pytest.param(
            *("--zero 3 --hsdp 2 --tied --accumulate 2", {"ranks": 4, "together": 2, "spares": 2}),
            marks=pytest.mark.soak,
        ),
        ("--zero 3 --hsdp 2 --tp 2", {"ranks": 8, "together": 4, "spares": 4}),
        ("--zero 3 --hsdp 2 --cp 2", {"ranks": 4, "together": 2, "spares": 2}),
        ("--pp 2 --tp 2 --layers 2 --schedule zb-h1", {"ranks": 8, "together": 4}),
        ("--precision float16", {"ranks": 2, "spares": 1}),
        ("--precision bfloat16", {"ranks": 2}),
    ],
)
def test_whatever_is_let_through_survives(
    tmp_path: Path, more: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAYOUTS, more, (more.split(), options))
    job = Job(tmp_path, more)
    job.check_nothing_is_lost({1: Events(job.events(1) * 2 // 3, 0.02)})


def test_another_may_die_while_the_first_is_replaced(tmp_path: Path) -> None:
    job = Job(tmp_path, "dp, with a spare")
    job.options = job.options | {"ranks": 3, "spares": 2}
    job.calm = job.run({})
    middle = job.events(1) // 2
    for at in range(1, 12, 2):  # of the spare, which takes the place
        job.check({1: Events(middle), 3: Events(at)})
    job.check({0: Events(middle), 1: Events(middle)})


def test_the_last_checkpoint_and_no_measurement_is_lost(tmp_path: Path) -> None:
    job = Job(tmp_path, "dp, on what is left")
    more = ("--eval-every", "1", "--save-every", "1", "--keep", "9", "--held-out", "0.3")
    folder, _ = job.run({}, *more)
    job.calm = folder, ""
    counted = Events(-1)
    job.run({0: counted}, *more)
    for at in range(20, counted.count + 1, 7):
        job.check({0: Events(at)}, *more)
        broken = job.home / str(job.number - 1)
        assert all(value is not None for value in evaluated(broken)), at


def evaluated(folder: Path) -> list[float | None]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["eval_loss"] for line in lines]


def test_who_takes_a_step_late_keeps_what_is_known_of_it() -> None:
    """Else it is neither recorded nor saved, if whoever took it dies in the next view."""

    class Late:
        done, ready, comm = 2, object(), SimpleNamespace(rank=0)
        position, reached, scaler = {}, {}, None
        last = StepMetrics(2, 5.0, 1.0, 1e-3, 1.0, 1.0, 0.0)

        def finish_step(self) -> None:
            self.done, self.ready = 3, None

    member: Any = SimpleNamespace(wanted=Wanted(2))
    carrier, late = Carrier(member), Late()
    carrier.trainer = late  # type: ignore[assignment]
    other = Standing(3, last=replace(late.last, step=3))
    comm: Any = SimpleNamespace(rank=0, all_gather_object=lambda mine: [mine, other])
    carrier.meet(comm)
    assert carrier.standing.done == 3 and carrier.standing.last == other.last


def test_when_nobody_holds_a_part_the_run_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    job = Job(tmp_path, "pp, a replica is lost")
    job.options = job.options | {"ranks": 2, "spares": 2}
    counted = Events(-1)
    job.run({0: counted}, "--save-every", "1")
    printed = job.check({0: Events(counted.count * 3 // 4)}, "--save-every", "1")
    assert "view 2: 2 ranks go on from what was saved, or the beginning" in printed
    assert "resumed after step" in printed


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--zero", "1"], "--zero 1 keeps on one rank what a replacement cannot get from a peer"),
        (["--precision", "fp8"], "--precision fp8 keeps on one rank"),
        (["--pp", "2", "--layers", "2"], r"a replica has 2 ranks .* use --replica 2"),
    ],
)
def test_what_a_peer_does_not_have_is_refused(
    tmp_path: Path, more: list[str], sentence: str
) -> None:
    words = [*WORDS, "--text", str(short_text(tmp_path, 700)), *more]
    statuses, printed = train_job(words, 2)
    assert statuses == [2, 2]
    assert re.search(sentence, printed), printed


def test_adapters_are_refused() -> None:
    """Nobody has tried whether a replacement finds the weights beside them."""
    config = parse([])
    adapted = replace(config, run=replace(config.run, lora=4, init="folder"))
    with pytest.raises(ConfigError, match="--lora keeps on one rank"):
        on_ranks_of(adapted, 2, Wanted(2))


def test_microbatches_have_no_more_rows_than_they_had() -> None:
    config = parse(["--batch", "16", "--accumulate", "2"])
    assert accumulating(config, 4, 4) is config
    assert accumulating(config, 3, 4).parallel.accumulate == 4
    assert accumulating(config, 1, 99).parallel.accumulate == 16
    assert accumulating(parse(["--batch", "16", "--pp", "2"]), 2, 4).parallel.accumulate == 1

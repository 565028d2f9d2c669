"""Ten runs send what they sent, in the order in which they sent it: whoever changes structure
changes none of it.

What each rank's threads did is compared with `golden_runs.json`, event by event. If a change means
to send something else, `python tests/test_golden_runs.py` writes the file anew, and its difference
is there to be read.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from layouts import Case, trained
from torch import nn

import minidist
from minidist.cli.train import train
from minidist.course.grader.grading import grade
from minidist.course.lesson import find_lesson, reference_answer
from minidist.full import DDP, FSDP
from minidist.full.collectives import all_reduce, broadcast
from minidist.full.comm import Communicator
from minidist.full.mesh import Layout
from minidist.full.trace import Trace
from minidist.further import Recipe

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).with_suffix("").parent / "golden_runs.json"
Said = dict[str, Any]


def replica(kind: Callable[..., Any], comm: Communicator) -> None:
    """Train for two steps, a small bucket or unit at a time."""
    torch.manual_seed(0)
    model = kind(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2)), comm, op="sum"
    )
    build = (
        model.optimizer
        if kind is FSDP
        else lambda kind, **options: kind(model.parameters(), **options)
    )
    optimizer = build(torch.optim.AdamW, lr=0.1)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(3, 6)).sum().backward()
        optimizer.step()


def save(comm: Communicator) -> None:
    """Save twice from two ranks that share the parameters."""
    with TemporaryDirectory() as folder:
        words = (
            "--layers 1 --hidden 16 --heads 2 --sequence 16 --batch 8 --zero 3 --steps 2 "
            "--save-every 1 --save"
        )
        shared = comm.all_gather_object(folder)[0]
        assert train([*shlex.split(words), shared], comm) == 0


def laid_out(schedule: str = "gpipe", **axes: int) -> tuple[int, Callable[[Communicator], Any]]:
    """Return how many ranks a layout has, and a step on it."""
    layout = Layout(**axes)
    recipe = Recipe(
        schedule=schedule,
        microbatches=4,
        sp="tp" in axes,
        chunks=2 if schedule == "zb-v" else 1,
    )
    return layout.size, lambda comm: trained(comm, Case(layout, recipe, batch=8, steps=1))


RUNS: dict[str, tuple[int, Callable[[Communicator], Any]]] = {
    "a ring": (4, lambda comm: all_reduce(np.ones(1001), comm, algorithm="ring")),
    "a tree": (5, lambda comm: broadcast(np.ones(1001), comm, root=2, algorithm="tree")),
    "DDP": (3, lambda comm: replica(partial(DDP, bucket_bytes=256, first_bucket_bytes=64), comm)),
    "ZeRO-3": (3, lambda comm: replica(FSDP, comm)),
    "tp2 --sp": laid_out(tp=2),
    "1f1b": laid_out("1f1b", pp=4),
    "zb-v": laid_out("zb-v", pp=2),
    "dp2 x pp2 x tp2": laid_out("1f1b", dp=2, pp=2, tp=2),
    "a save": (2, save),
}


def did(name: str) -> Said:
    """Run it; return for each thread of a rank what it sent, and a digest of all its events in
    order.
    """
    ranks, program = RUNS[name]
    trace = Trace()
    minidist.run(program, ranks, trace=trace)
    threads: dict[str, list[str]] = defaultdict(list)
    sent: dict[str, list[int]] = defaultdict(list)
    # a send is recorded as it is found complete
    for event in sorted(trace.events, key=lambda event: event.start):
        thread = f"rank {event.rank} {event.track}"
        threads[thread].append(f"{event.kind} {event.name} {event.bytes}")
        if event.kind == "send":
            sent[thread].append(event.bytes)
    return {
        thread: {
            "messages": len(sent[thread]),
            "bytes": sum(sent[thread]),
            "events": len(events),
            "digest": sha256("\n".join(events).encode()).hexdigest()[:16],
        }
        for thread, events in sorted(threads.items())
    }


def graded() -> Said:
    """Return what the grader says of a lesson's reference, and of one of its mistakes."""
    lesson = find_lesson(ROOT / "lessons", "02_ring_all_reduce")
    answers = {"reference": reference_answer(lesson)}
    for mistake in sorted((lesson.folder / "mistakes").glob("*.py"))[:1]:
        answers[mistake.stem] = reference_answer(lesson, f"mistakes/{mistake.name}")
    return {
        name: [
            f"{test.check.title}: {test.score:g}/{test.max_score:g} {test.output}"
            for test in grade(lesson, answer)
        ]
        for name, answer in answers.items()
    }


@pytest.mark.parametrize("name", RUNS)
def test_a_run_sends_what_it_sent(name: str) -> None:
    assert did(name) == json.loads(GOLDEN.read_text())[name]


@pytest.mark.soak
def test_a_grade_says_what_it_said() -> None:
    assert graded() == json.loads(GOLDEN.read_text())["a grade"]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    GOLDEN.write_text(
        json.dumps({name: did(name) for name in RUNS} | {"a grade": graded()}, indent=1) + "\n"
    )

"""Spans as profilers show them, and `train --profile`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import clean_environment, mpirun, torchrun
from torch.autograd import profiler
from training import PROGRAM, TINY, train_on

import minidist
from minidist.cli.train import main
from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator
from minidist.full.comm.torch_wire import marks

WORKS = """
    import sys
    import minidist
    from minidist.cli.train import train

    comm = minidist.init(limit=60)
    for zero in "03":
        train([*sys.argv[2:], "--zero", zero, "--profile", sys.argv[1] + "/zero" + zero], comm)
"""


def ranges(file: Path) -> dict[int, list[tuple[float, float, str]]]:
    """Return the ranges that a profile has on each thread: begin, end and name, in order, the outer
    ones first.
    """
    found = defaultdict(list)
    for entry in json.loads(file.read_text())["traceEvents"]:
        ours = (
            entry.get("ph") == "X"
            and entry["cat"] == "user_annotation"
            and not entry["name"].startswith("gloo:")
        )
        if ours:  # gloo's messages overlap
            found[entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"], entry["name"]))
    return {
        thread: sorted(mine, key=lambda each: (each[0], -each[1])) for thread, mine in found.items()
    }


def check_nested(mine: list[tuple[float, float, str]]) -> None:
    """Assert that of any two ranges of a thread, one is inside the other or they do not touch."""
    opened: list[float] = []
    for begin, end, name in mine:
        while opened and opened[-1] <= begin:
            opened.pop()
        assert not opened or end <= opened[-1], name
        opened.append(end)


def test_a_profile_shows_what_each_rank_did_by_name_on_the_thread_that_did_it(
    tmp_path: Path,
) -> None:
    job = torchrun(2, WORKS, str(tmp_path), *TINY, "--steps", "5")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("profile of steps 2 to 4 written to ") == 2
    for folder, beside in (
        ("zero0", "all_reduce"),
        ("zero3", "all_gather"),
        ("zero3", "reduce_scatter"),
    ):
        files = sorted((tmp_path / folder).iterdir())
        assert [file.name for file in files] == ["rank-0000.json", "rank-0001.json"]
        for file in files:
            threads = ranges(file)
            (main_thread,) = (
                mine for mine in threads.values() if any(name == "forward" for *_, name in mine)
            )
            names = [name for *_, name in main_thread]
            assert [names.count(name) for name in ("forward", "backward", "optimizer")] == [3, 3, 3]
            assert {f"ProfilerStep#{step}" for step in (2, 3, 4)} <= set(names), (
                "numbered as the run does"
            )
            others = [mine for mine in threads.values() if mine is not main_thread]
            calls = sum(name.startswith(beside) for mine in others for *_, name in mine)
            assert calls and calls % 3 == 0, (folder, beside, calls)
            for mine in threads.values():
                check_nested(mine)


def test_a_profile_under_mpirun_and_of_a_run_that_is_short(tmp_path: Path) -> None:
    words = [*TINY, "--zero", "3", "--steps", "2", "--profile", str(tmp_path / "new" / "profile")]
    job = mpirun(2, PROGRAM, "train", *words)
    assert job.returncode == 0, job.stderr
    assert "profile of steps 2 to 2 written to " in job.stdout
    for rank in range(2):
        threads = ranges(tmp_path / "new" / "profile" / f"rank-000{rank}.json")
        names = {name.split()[0] for mine in threads.values() for *_, name in mine}
        assert {"forward", "backward", "optimizer", "all_gather", "reduce_scatter"} <= names


def test_a_profile_of_warm_up_alone_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--steps", "1", "--profile", str(tmp_path)]) == 0
    assert re.search(
        "^no profile was written: it takes a run of 2 steps", capsys.readouterr().out, re.M
    )
    assert list(tmp_path.iterdir()) == []


def test_a_profile_that_cannot_be_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([*TINY, "--profile", str(tmp_path / "file")]) == 2
    assert re.fullmatch(
        r"minidist train: --profile \S+ cannot be written .*give another path\n",
        capsys.readouterr().err,
    )
    assert train_on(2, f"--profile {tmp_path / 'new'}") == 2
    assert "takes a process a rank: use mpirun" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---------------------------------------------------------------- marks


def test_every_span_of_every_thread_is_an_nvtx_range(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: defaultdict[int, list[str]] = defaultdict(list)
    seen: set[tuple[str, bool]] = set()
    me = threading.get_ident

    def push(name: str) -> None:
        opened[me()].append(name)
        seen.add((name, threading.current_thread().name.endswith("stream")))

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: opened[me()].pop())

    def program(comm: Communicator) -> None:
        comm.ledger.mark = marks.on_gpu
        group, stream = comm.split(0), comm.stream()
        with pytest.raises(ZeroDivisionError), group.span("forward {}"):
            all_reduce(np.ones(3), group, algorithm="tree")
            raise ZeroDivisionError
        stream.launch(all_reduce, np.ones(3), stream.comm, "sum", "ring").wait()

    minidist.run(program, 2)
    assert seen == {
        ("forward {}", False), ("all_reduce tree", False), ("all_reduce ring", True), ("wait for all_reduce", False)
    }  # fmt: skip
    assert not any(opened.values()), "each is closed on the thread that opened it"


def test_while_nobody_profiles_no_range_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(profiler, "record_function", made.append)
    assert marks.on_cpu("forward") is None and made == []


def test_a_span_on_ranks_that_are_threads_does_not_import_torch() -> None:
    code = """
import sys, numpy, minidist
from minidist.full.collectives import all_reduce

def program(comm):
    with comm.span("forward"):
        all_reduce(numpy.ones(3), comm)

minidist.run(program, 2)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=clean_environment())

"""A run seen from outside: stragglers, TensorBoard."""

from __future__ import annotations

import json
import re
import resource
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import TINY, train_on

from minidist import Cluster, Layout, run
from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator
from minidist.full.strategy import Parallel
from minidist.full.trainer.observed.stragglers import STEPS, Stragglers

DOCS = Path(__file__).parents[2] / "docs"


# ---------------------------------------------------------------- stragglers


def steps_with(slow: int | None, comm: Communicator) -> list[int | None]:
    """Take steps in which one rank computes 1.5 times as long as the others; return who is named."""
    found = Stragglers(Layout(dp=comm.size), 4 * comm.size)
    named = []
    for step in range(STEPS + 2):
        began, waited = comm.clock(), comm.traffic.seconds
        # all others differ a little, and one has a bad moment
        busy = 1.5 if comm.rank == slow else 1 + 0.02 * (comm.rank % 5)
        comm.advance(3.0 if step == 2 and comm.rank == 1 else busy)
        all_reduce(np.ones(1000), comm)
        told = np.zeros(comm.size)
        told[comm.rank] = comm.clock() - began - (comm.traffic.seconds - waited)
        all_reduce(told, comm)
        named.append(found.step(told.tolist()).straggler)
    return named


@pytest.mark.parametrize("ranks", [2, 3, 8, pytest.param(64, marks=pytest.mark.soak)])
def test_the_slow_rank_is_named_and_nobody_else(ranks: int) -> None:
    cluster = Cluster.h100(nodes=8)
    for slow in {0, ranks - 1}:
        named = run(lambda comm, slow=slow: steps_with(slow, comm), ranks, cluster=cluster)[0]
        assert named == [None] * (STEPS - 1) + [slow] * 3
    assert run(lambda comm: steps_with(None, comm), ranks, cluster=cluster)[0] == [None] * (
        STEPS + 2
    )


def test_more_rows_or_other_layers_are_no_fault() -> None:
    uneven = Stragglers(Layout(dp=3), 4)  # 2, 1 and 1 rows
    stages = Stragglers(Layout(dp=2, pp=2), 4)  # the last stage has the head
    for _ in range(STEPS):
        assert uneven.step([2.0, 1.0, 1.0]).straggler is None
        assert stages.step([1.0, 3.0, 1.0, 3.0]).straggler is None
    for _ in range(STEPS):
        last = stages.step([1.0, 3.0, 1.0, 4.5])
    assert last.straggler == 3 and last.compute_median == 2.0
    # how slow it is, is its own score, and not the longest computing of this step
    assert stages.step([9.0, 3.0, 1.0, 4.5]).straggler_times == 1.5


def test_train_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other one waits for its gradients, and takes as long for the step."""
    step = Parallel.step

    def slow(self: Parallel, *batch: Any) -> Any:
        time.sleep(0.05 if self.mesh.world.rank == 1 else 0)
        return step(self, *batch)

    monkeypatch.setattr(Parallel, "step", slow)
    page = f"--tensorboard {tmp_path / 'curves'} --metrics {tmp_path / 'm'} --log-every 1"
    assert train_on(2, *TINY, f"--steps {STEPS + 2} {page}") == 0
    assert re.search(r"rank 1 is slow: it computes \d+\.\d times as long", capsys.readouterr().out)
    last = json.loads((tmp_path / "m").read_text().splitlines()[-1])
    assert last["straggler"] == last["compute_rank"] == 1
    assert 1.0 in scalars(tmp_path / "curves")["straggler"].values()


# ---------------------------------------------------------------- TensorBoard


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Read the files that TensorBoard reads; a file that purges later steps takes their place."""
    from tensorboardX.proto.event_pb2 import Event as Record

    found: dict[str, dict[int, float]] = {}
    for file in sorted(folder.glob("events*")):
        data = file.read_bytes()
        while data:
            length = struct.unpack("<Q", data[:8])[0]
            record = Record.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if record.HasField("session_log"):
                for curve in found.values():
                    for step in [step for step in curve if step >= record.step]:
                        del curve[step]
            for value in record.summary.value:
                found.setdefault(value.tag, {})[record.step] = value.simple_value
    return found


def test_curves_go_on_where_a_run_is_resumed(tmp_path: Path) -> None:
    words = f"--save {tmp_path / 'run'} --save-every 2 --tensorboard {tmp_path / 'curves'}"
    assert train_on(2, *TINY, f"--steps 5 {words}") == 0
    first = scalars(tmp_path / "curves")
    assert sorted(first["loss"]) == [1, 2, 3, 4, 5]
    assert {"sent/dp", "memory/parameters", "compute_rank", "tokens_per_second"} <= set(first)
    time.sleep(1.1)  # names of files count seconds
    assert train_on(2, *TINY, f"--steps 7 {words} --resume") == 0
    both = scalars(tmp_path / "curves")
    assert sorted(both["loss"]) == [1, 2, 3, 4, 5, 6, 7]
    assert [both["loss"][step] for step in range(1, 6)] == [
        first["loss"][step] for step in range(1, 6)
    ]


def test_a_run_goes_on_without_curves_that_the_disk_has_no_room_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also many steps after the first that could not be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # bytes of a file
    try:
        assert train_on(1, *TINY, f"--steps 150 --tensorboard {tmp_path / 'curves'}") == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and "curves takes no more (File too large): going on without" in told[0]


def test_a_folder_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert train_on(2, f"--steps 1 --tensorboard {tmp_path / 'file'}") == 2
    assert f"--tensorboard {tmp_path / 'file'}" in capsys.readouterr().err

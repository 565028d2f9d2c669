"""`--plan FILE` reads what torch's own schedules write, and runs it; and our zb1p is torch's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ranks import clean_environment
from training import train_on

from minidist.full.launch.jobs import run_job
from minidist.full.pipeline import Kind, ScheduleError, check, plan, read_plan

NAMES = {  # and the stages of rank 0, of four
    "Interleaved1F1B": (0, 2),
    "LoopedBFS": (0, 2),
    "InterleavedZeroBubble": (0, 2),
    "ZBVZeroBubble": (0, 3),
    "DualPipeV": (0, 3),
}
DUMP = f"""
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
for name, numbers in {NAMES}.items():
    stages = [PipelineStage(nn.Linear(4, 4), number, 4, torch.device("cpu")) for number in numbers]
    made = getattr(schedules, "Schedule" + name)(stages, 4, loss_fn=nn.MSELoss())
    for format in ("compute_only", "compute_comms"):
        if format == "compute_only" or name == "Interleaved1F1B":
            made._dump_csv(sys.argv[1] + "/" + name + "." + format + ".csv", format)
"""


SIZES = [(p, v, m) for p in range(1, 6) for v in (1, 2, 3) for m in (1, 2, 3, 4, 6, 8, 9, 11, 15)]
# The words of each rank in torch's plan, or why it refuses the number of microbatches.
ZERO_BUBBLE = f"""
import json
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
from torch.testing._internal.distributed.fake_pg import FakeStore
found, size = [], 0
for p, v, m in {SIZES}:
    if p != size:
        if size:
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=p)
        size = p
    stages = [PipelineStage(nn.Linear(4, 4), c * p, p * v, torch.device("cpu")) for c in range(v)]
    try:
        made = ScheduleInterleavedZeroBubble(stages, m, loss_fn=nn.MSELoss())
    except ValueError as error:
        found.append(str(error))
        continue
    rows = [made.pipeline_order[rank] for rank in range(p)]
    found.append([[str(action) for action in row if action is not None] for row in rows])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the CSV of each schedule, for 2 ranks and 4 microbatches."""
    folder = tmp_path_factory.mktemp("csv")
    command = [sys.executable, "-c", DUMP, str(folder)]
    job = run_job(command, env=clean_environment(), timeout=100, capture=True)
    assert job.returncode == 0, job.stderr
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_of_torch_is_read_checked_and_trains_like_one_rank(name: str, dumped: Path) -> None:
    file = dumped / f"{name}.compute_only.csv"
    plan = read_plan(file.read_text())
    check(plan)
    assert (plan.ranks, plan.stages, plan.microbatches, plan.stages_of(0)) == (
        2,
        4,
        4,
        [*NAMES[name]],
    )
    words = file.read_text().replace("(", ",").replace(")OVERLAP_F_B", "").replace(";", ",").split()
    assert [",".join(map(str, row)) for row in plan.actions] == [
        ",".join(word for word in row.split(",") if word) for row in words
    ]
    assert (
        train_on(2, f"--pp 2 --plan {file} --layers 4 --steps 3 --dropout 0.1 --tied --verify") == 0
    )


def test_zb1p_is_torchs_action_by_action_and_refuses_the_same_sizes() -> None:
    command = [sys.executable, "-c", ZERO_BUBBLE]
    job = run_job(command, env=clean_environment(), timeout=100, capture=True)
    assert job.returncode == 0, job.stderr
    refused = 0
    for (p, v, m), found in zip(SIZES, json.loads(job.stdout), strict=True):
        if isinstance(found, str):
            refused += 1
            assert "multiple of the number of rounds" in found
            with pytest.raises(ValueError, match=r"zb1p takes microbatches in [0-9]+ equal groups"):
                plan("zb1p", p, m, v)
        else:
            ours = plan("zb1p", p, m, v).actions
            assert [[str(action) for action in row] for row in ours] == found, (p, v, m)
    assert 10 < refused < len(SIZES) / 4


def test_spaces_and_commas_mean_the_same() -> None:
    plan = read_plan("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n")
    assert read_plan("0F0,0F1,,,0B0,0B1\r\n,1F0, 1B0,1F1,1B1,\r\n") == plan
    assert read_plan("0F0,0F1, ,(0B0;0B1)OVERLAP_F_B\n1F0,1B0,1F1,1B1 # the end") == plan
    assert read_plan(",,\n0F0,0B0").ranks == 2
    assert [action.kind for action in plan.actions[0]] == [
        Kind.FORWARD,
        Kind.FORWARD,
        Kind.BACKWARD,
        Kind.BACKWARD,
    ]


def test_what_torch_adds_before_it_runs_is_refused(
    dumped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = dumped / "Interleaved1F1B.compute_comms.csv"
    assert train_on(2, f"--pp 2 --plan {file} --layers 4 --steps 1") == 2
    error = capsys.readouterr().err
    assert 'write the plan by _dump_csv(file, "compute_only")' in error
    with pytest.raises(
        ScheduleError, match="word 2: 0REDUCE_GRAD is added to a plan before it runs"
    ):
        read_plan("0F0,0REDUCE_GRAD")

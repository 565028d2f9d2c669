"""docs/your-program.md is true: its program runs as it stands there, and the sentences are those
that come.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import clean_environment

import minidist
from minidist.full.comm import Cluster, Communicator
from minidist.full.comm.start import launched_over_mpi, set_as_torchrun, under_mpirun
from minidist.full.launch.jobs import run_job
from minidist.torch_backend.any_name import OF_TORCH

PAGE = Path(__file__).parents[1] / "docs" / "your-program.md"
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
BLOCKS = {}
for language, block in FENCED:
    if language == "python":
        title, _, BLOCKS[title] = block.removeprefix("# ").partition("\n")
SAID = [block for language, block in FENCED if not language]


@pytest.fixture
def page(tmp_path: Path) -> dict[str, Any]:
    """Return the names of the page's program, which is in a file `train.py`."""
    names: dict[str, Any] = {}
    file = tmp_path / "train.py"
    file.write_text("# train.py\n" + BLOCKS["train.py"])
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names


def test_who_is_missing_is_said_with_the_line(page: dict[str, Any]) -> None:
    with pytest.raises(minidist.DeadlockError) as hung:
        exec(BLOCKS["who is missing"], page)
    lines = str(hung.value).splitlines()
    for line in SAID[0].splitlines()[1:]:
        assert line in lines, "\n".join(lines)
    assert "loss.backward()" in BLOCKS["train.py"].splitlines()[17 - 2]


def test_bytes_and_seconds_of_64_ranks(page: dict[str, Any]) -> None:
    """As on the page, with two batches for each rank, and on fewer ranks."""
    assert "ranks=64" in BLOCKS["bytes and seconds"]
    whole = BLOCKS["train.py"].replace("torch.randn(10,", "torch.randn(2 * ranks,")
    exec(compile(whole, "train.py", "exec"), page)
    exec(BLOCKS["bytes and seconds"].rpartition("\nminidist.run")[0], page)
    cluster = Cluster.h100(nodes=1)
    found = minidist.run(page["measured"], ranks=4, torch=True, cluster=cluster)
    n = 256 * 1024 * 2 + 1024 + 256
    steps = 2 * (2 * 3 / 4 * 4 * n)
    assert all(steps < sent < 2 * steps for sent, _ in found), "and what DDP sends before"
    assert found == minidist.run(page["measured"], ranks=4, torch=True, cluster=cluster)


@pytest.mark.parametrize("name", [None, "minidist", *OF_TORCH[1:]])
@pytest.mark.filterwarnings("ignore:Attempted to get default timeout")
def test_every_backends_name_means_ours(name: str | None) -> None:
    def program(comm: Communicator) -> str:
        dist.init_process_group(name)
        one = torch.ones(1)
        dist.all_reduce(one, group=dist.new_group([0, 1], backend=name))
        assert one.item() == comm.size
        return dist.get_backend()

    assert minidist.run(program, 2, torch=True) == ["minidist"] * 2


def test_the_name_of_torchs_own_mpi_is_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="doesn't have MPI built in"):
        minidist.run(lambda comm: dist.init_process_group("mpi"), 2, torch=True)


def test_products_take_time_on_a_cluster() -> None:
    def program(comm: Communicator) -> float:
        matrix = torch.ones(64, 64, requires_grad=True)
        (matrix @ torch.ones(64, 64)).sum().backward()
        return comm.clock()

    flops = 2 * 64**3 * 2  # forward, and the gradient of one operand
    cluster = Cluster.h100(nodes=1)
    assert minidist.run(program, 1, torch=True, cluster=cluster) == [flops / cluster.flops]


def test_a_torchrun_inside_a_rank_of_launch_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("MINIDIST_OVER_MPI", "4001")):
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.setenv(name, "")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    set_as_torchrun()
    assert os.environ["MASTER_PORT"] == "4001" and launched_over_mpi()
    monkeypatch.setenv("MASTER_PORT", "4002")  # torchrun sets its own
    assert not launched_over_mpi() and not under_mpirun()


SCRIPT = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for name, said in (("RANK", dist.get_rank()), ("LOCAL_RANK", dist.get_rank()), ("WORLD_SIZE", 2)):
    assert os.environ[name] == str(said), name
mine = torch.full((3,), float(os.environ["LOCAL_RANK"]))
dist.all_reduce(mine)
print(dist.get_backend(), mine.tolist())

import minidist

print(minidist.init().wire.kind)
dist.destroy_process_group()
"""


def test_a_script_for_torchrun_runs_over_mpi(tmp_path: Path) -> None:
    """Nothing in it is ours; and torchrun's variables do not keep our own programs from MPI."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    command = [sys.executable, "-m", "minidist", "launch", "-n", "2", str(file)]
    job = run_job(command, env=clean_environment(), timeout=100, capture=True)
    assert job.returncode == 0, job.stderr
    said = sorted(job.stdout.splitlines())
    assert said == [
        "[0] minidist [1.0, 1.0, 1.0]",
        "[0] mpi",
        "[1] minidist [1.0, 1.0, 1.0]",
        "[1] mpi",
    ]

"""Which GPU a rank takes, and when ranks may share one: on a machine whose GPUs and NCCL are made
up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import clean_environment, torchrun, warm_python

from minidist.full.comm.errors import LaunchError
from minidist.full.comm.torch_wire import gpus
from minidist.full.launch.jobs import run_job

SET = ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS")  # by ranks that share a GPU


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One without GPUs; NCCL is new enough."""
    for name in os.environ:
        if name.startswith(("SLURM_", "LOCAL_", "NCCL_", "MINIDIST_")):
            monkeypatch.delenv(name)
    for name in SET:
        monkeypatch.setenv(name, "")  # so that what the test sets is taken back
        monkeypatch.delenv(name)
    have(monkeypatch, 0, (2, 30, 7))
    return monkeypatch


def have(machine: pytest.MonkeyPatch, count: int, version: tuple[int, ...]) -> None:
    """Give the machine so many GPUs, and this NCCL."""
    machine.setattr(torch.cuda, "device_count", lambda: count)
    machine.setattr(dist, "is_nccl_available", lambda: True)
    machine.setattr(gpus, "nccl_version", lambda: version)


def taken(machine: pytest.MonkeyPatch, ranks: int, each: int | None = None) -> list[int | None]:
    """Return the GPU that each rank takes, as torchrun starts them."""
    if each is not None:
        machine.setenv(gpus.SHARING, str(each))
    machine.setenv("LOCAL_WORLD_SIZE", str(ranks))
    found = []
    for rank in range(ranks):
        machine.setenv("LOCAL_RANK", str(rank))
        found.append(gpus.own_gpu())
    return found


def test_each_rank_has_a_gpu_of_its_own_or_none_has_which_is_said(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert taken(machine, 2) == [None, None]
    have(machine, 3, (2, 20))
    assert taken(machine, 3) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    assert taken(machine, 4) == [None] * 4
    assert capsys.readouterr().err == (
        "minidist: 4 ranks are more than this machine's GPUs (3), so they work on the CPU: start 3, "
        "or set MINIDIST_RANKS_PER_GPU=2\n"
    )
    assert not set(SET) & os.environ.keys()
    machine.setattr(dist, "is_nccl_available", lambda: False)
    assert taken(machine, 2) == [None, None]


def test_rank_r_takes_gpu_r_divided_by_the_ranks_of_each(machine: pytest.MonkeyPatch) -> None:
    have(machine, 2, (2, 30))
    assert taken(machine, 4, each=2) == [0, 0, 1, 1]
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1" and "NCCL_MAX_CTAS" not in os.environ
    assert taken(machine, 3, each=4) == [0, 0, 0]
    assert os.environ["NCCL_MAX_CTAS"] == "4", "each leaves room for the others"
    assert taken(machine, 8, each=4) == [0, 0, 0, 0, 1, 1, 1, 1]
    gpus.share_gpus(1, 1, 1)
    with pytest.raises(LaunchError, match="for 1 of the 2 ranks"):
        gpus.share_gpus(1, 1, 2)
    machine.setenv("NCCL_MAX_CTAS", "2")
    assert taken(machine, 4, each=4) and os.environ["NCCL_MAX_CTAS"] == "2", (
        "what the user has set stays"
    )


def test_under_slurm_ranks_are_counted_by_its_variables(machine: pytest.MonkeyPatch) -> None:
    have(machine, 2, (2, 31, 1))
    machine.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    machine.setenv("SLURM_LOCALID", "3")
    assert gpus.own_gpu() is None
    machine.setenv(gpus.SHARING, "2")
    assert gpus.own_gpu() == 1
    have(machine, 1, (2, 31, 1))
    machine.setenv("SLURM_GPUS_PER_TASK", "1")
    assert gpus.own_gpu() == 0, "each rank sees its own alone"


@pytest.mark.parametrize(
    ("count", "version", "each", "words"),
    [
        (
            0,
            (2, 30),
            "2",
            "MINIDIST_RANKS_PER_GPU=2, but this machine has no GPU that NCCL could use: leave it "
            "out",
        ),
        (
            1,
            (2, 30),
            "2",
            "=2 leaves room on this machine's GPUs (1) for 2 of the 4 ranks: use "
            "MINIDIST_RANKS_PER_GPU=4",
        ),
        (
            1,
            (2, 29, 7),
            "4",
            "MINIDIST_RANKS_PER_GPU=4 needs NCCL 2.30 or newer, but this is 2.29.7: pip install ",
        ),
        (1, (2, 30), "two", "MINIDIST_RANKS_PER_GPU=two must be a whole number"),
        (1, (2, 30), "0", "MINIDIST_RANKS_PER_GPU=0 must be from 1 to 10,000"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    machine: pytest.MonkeyPatch, count: int, version: tuple[int, ...], each: str, words: str
) -> None:
    have(machine, count, version)
    machine.setenv(gpus.SHARING, each)
    with pytest.raises(LaunchError) as caught:
        taken(machine, 4)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not set(SET) & os.environ.keys()


@pytest.mark.parametrize(
    ("cuda", "package"), [("12.8", "nvidia-nccl-cu12"), ("13.0", "nvidia-nccl-cu13")]
)
def test_the_sentence_names_the_nccl_of_this_cuda(
    machine: pytest.MonkeyPatch, cuda: str, package: str
) -> None:
    have(machine, 1, (2, 28, 9))
    machine.setattr(torch.version, "cuda", cuda)
    fault = gpus.sharing_fault()
    assert f"pip install --target FOLDER --no-deps '{package}>=2.30'" in fault
    assert fault.endswith("start with LD_PRELOAD=FOLDER/nvidia/nccl/lib/libnccl.so.2")


NCCL = """
#include <stddef.h>
int ncclGetVersion(int *version) { *version = 23007; return 0; }
"""
ASK = """
import ctypes, sys
import torch
torch.cuda.nccl.version = lambda: (2, 28, 9)
from minidist.full.comm.torch_wire.gpus import nccl_library, nccl_version
print(nccl_version(), nccl_library())
ctypes.CDLL(sys.argv[1])
print(nccl_version(), nccl_library())
"""


def test_the_nccl_that_is_loaded_is_asked_and_not_the_one_torch_was_built_for(
    tmp_path: Path,
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler to make a library with")
    source, library, program = tmp_path / "nccl.c", tmp_path / "libnccl.so.2", tmp_path / "ask.py"
    source.write_text(NCCL)
    program.write_text(ASK)
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libnccl.so.2",
        "-o",
        str(library),
        str(source),
    ]
    subprocess.run(command, check=True)
    job = run_job(
        [*warm_python(), str(program), str(library)],
        env=clean_environment(),
        timeout=60,
        capture=True,
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == ["(2, 28, 9) torch itself", f"(2, 30, 7) {library}"]


def test_ranks_that_cannot_share_a_gpu_end_with_the_sentence() -> None:
    if torch.cuda.device_count():
        pytest.skip("there is a GPU, so they may be able to")
    job = torchrun(2, "import minidist; minidist.init()\n", env={gpus.SHARING: "2"})
    assert job.returncode == 1
    assert (
        "MINIDIST_RANKS_PER_GPU=2, but this machine has no GPU that NCCL could use: leave it out"
        in job.stderr
    )

"""Which GPU is a rank's own, and how several ranks share one.

    MINIDIST_RANKS_PER_GPU=4     ranks 0 1 2 3 ─▶ GPU 0     ranks 4 5 6 7 ─▶ GPU 1

Ranks that share a GPU take turns on it: that shows whether a program is right, and not how fast it
is. NCCL has allowed it since version 2.30.
"""

import ctypes
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from minidist.full.comm.errors import LaunchError
from minidist.full.comm.job.limit import first_set
from minidist.full.options import RANKS, read_number

SHARING = "MINIDIST_RANKS_PER_GPU"
OLDEST = (2, 30)  # NCCL that lets several ranks use one GPU
FEW_BLOCKS = 4  # from so many ranks a GPU on, each must leave room for the others' kernels


def own_gpu() -> int | None:
    """Return the number of this rank's GPU; None if the machine has none, or fewer than its ranks
    need, which its first rank then says.

    Raises
    ------
    LaunchError
        If ranks are to share GPUs, and cannot.
    """
    each, gpus = ranks_per_gpu(), count_gpus()
    local = number_in("LOCAL_RANK", "SLURM_LOCALID", default=0)
    neighbours = number_in(
        "LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", default=local + 1
    )
    if gpus == 1 and "SLURM_GPUS_PER_TASK" in os.environ:  # srun lets each rank see its own only
        local, neighbours = 0, 1
    if each > 1:
        share_gpus(each, gpus, neighbours)
    if neighbours <= gpus * each:
        return local // each
    if gpus and local == 0:
        sys.stderr.write(
            f"minidist: {neighbours} ranks are more than this machine's GPUs ({gpus}), so they work "
            f"on the CPU: start {gpus}, or set {SHARING}={-(-neighbours // gpus)}\n"
        )
    return None


def count_gpus() -> int:
    """Return how many GPUs of this machine NCCL could use."""
    return torch.cuda.device_count() if dist.is_nccl_available() else 0


def ranks_per_gpu() -> int:
    """Return how many ranks share a GPU, as the environment says."""
    written = os.environ.get(SHARING, "1")
    try:
        return read_number(written, int, RANKS)
    except ValueError as error:
        raise LaunchError(f"{SHARING}={written} {error}") from None


def share_gpus(each: int, gpus: int, ranks: int) -> None:
    """Have NCCL accept `each` ranks on a GPU; raise LaunchError if it cannot, or there are too few
    GPUs.
    """
    if not gpus:
        raise LaunchError(
            f"{SHARING}={each}, but this machine has no GPU that NCCL could use: leave it out"
        )
    if ranks > gpus * each:
        room = f"leaves room on this machine's GPUs ({gpus}) for {gpus * each} of the {ranks} ranks"
        raise LaunchError(
            f"{SHARING}={each} {room}: use {SHARING}={-(-ranks // gpus)}, or fewer ranks"
        )
    if each == 1:
        return
    if fault := sharing_fault():
        raise LaunchError(f"{SHARING}={each} {fault}")
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    if each >= FEW_BLOCKS:
        os.environ.setdefault("NCCL_MAX_CTAS", "4")


def sharing_fault() -> str:
    """Return why NCCL refuses several ranks on a GPU, and which does not; empty if it accepts
    them.
    """
    if (version := nccl_version()) >= OLDEST:
        return ""
    package = f"nvidia-nccl-cu{(torch.version.cuda or '13').partition('.')[0]}"
    return (
        f"needs NCCL 2.30 or newer, but this is {'.'.join(map(str, version))}: pip install "
        f"--target FOLDER --no-deps '{package}>=2.30', and start with "
        "LD_PRELOAD=FOLDER/nvidia/nccl/lib/libnccl.so.2"
    )


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that torch uses, which may be newer than the one that torch
    was built for.
    """
    try:
        # as it is loaded, not another one of this machine
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
    except OSError:  # it is a part of torch's own library
        return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def nccl_library() -> str:
    """Return the file that NCCL was loaded from, or "torch itself"."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(
        (line.split(maxsplit=5)[5] for line in lines if "/libnccl.so" in line), "torch itself"
    )


def number_in(*names: str, default: int | None = None) -> int:
    """Return the first number in the first of these variables that is set: SLURM writes `4(x2)` for
    4 on 2 nodes.
    """
    found = re.match(r"\d+", first_set(*names))
    if found is None and default is None:
        raise LaunchError(
            f"none of {', '.join(names)} is a number: start with torchrun, or with srun and "
            "MASTER_ADDR"
        )
    return int(found.group()) if found else int(default or 0)

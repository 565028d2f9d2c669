"""What every rank of a launch does: `python -m minidist.bench.worker LAUNCH FILE NAME [options]`,
under mpirun.

Rank 0 writes to FILE what was measured, and on which machine.
"""

import os
import pickle
import platform
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy

from minidist.bench.measure import Measurement
from minidist.bench.options import parse
from minidist.bench.subject import ON_ONE_GPU, Setting, find_subject, measured
from minidist.full.comm import Communicator, init


def main(launch: str, file: str, argv: list[str]) -> None:
    """Measure, and write the file."""
    options, comm = parse(argv), init()
    wanted = (
        "gloo" in options.peers
        and launch == "shipped"
        and any(find_subject(name).gloo for name in options.names)
    )
    gloo = start_gloo(comm, f"{file}.gloo") if wanted else None
    measurements = collected(Setting(options, launch, comm, gloo))
    if comm.rank == 0:
        Path(file).write_bytes(pickle.dumps((machine(), measurements)))
    if gloo is not None:
        gloo.destroy_process_group()


def collected(setting: Setting) -> list[Measurement]:
    """Return what a launch measures, with a line of progress on standard error for each case."""
    measurements: list[Measurement] = []
    for (bench, case), found in groupby(measure(setting), lambda m: (m.bench, m.case)):
        if setting.comm.rank == 0:
            print(f"{setting.launch}: {bench} {case}", file=sys.stderr, flush=True)
        measurements += found
    return measurements


def measure(setting: Setting) -> Iterator[Measurement]:
    """Yield what a launch measures; those by mpirun stand between two probes of the machine.

    Only the shipped launch runs more than collectives.
    """
    options, launch, copy = setting.options, setting.launch, find_subject("copy")
    names = options.names if launch == "shipped" else options.collectives
    if launch == "here":
        names = ON_ONE_GPU if options.names == ("gpu",) else ("threads",)
    by_mpirun = launch in ("shipped", "tuned")
    if by_mpirun:
        yield from measured(copy, setting)
    for name in names:
        if not (by_mpirun and name in ("copy", "threads")):
            yield from measured(find_subject(name), setting)
    if by_mpirun and options.names != ("copy",):
        yield from measured(copy, setting._replace(when="after"))


def start_gloo(comm: Communicator, file: str) -> Any:
    """Return torch.distributed with a gloo group of the same ranks, which meet in a new file."""
    import torch.distributed as distributed

    distributed.init_process_group("gloo", f"file://{file}", rank=comm.rank, world_size=comm.size)
    return distributed


def machine() -> dict[str, object]:
    """Return what the numbers depend on, by name; empty where this process has not loaded the
    library.
    """
    torch, mpi = sys.modules.get("torch"), sys.modules.get("mpi4py.MPI")
    library = "" if mpi is None else mpi.Get_library_version().split("\n")[0]
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "mpi": " ".join(library.split()),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__ if torch is not None else "",
        "gpu": torch.cuda.get_device_name()
        if torch is not None and torch.cuda.is_initialized()
        else "",
    }


def processor() -> str:
    """Return the name of the processor, or of its architecture where the system tells no more."""
    known = Path("/proc/cpuinfo")
    names = (
        re.findall(r"model name\s*: (.*)", known.read_text())
        if known.exists()
        else [platform.processor()]
    )
    return "".join(names[:1]) or platform.machine()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])

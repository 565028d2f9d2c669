"""Which machine and which libraries the numbers of a run depend on."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import numpy


def machine() -> dict[str, object]:
    """Return what the numbers depend on, by name; empty where this process has not loaded the library."""
    torch, mpi = sys.modules.get("torch"), sys.modules.get("mpi4py.MPI")
    library = "" if mpi is None else mpi.Get_library_version().replace("\t", " ").split("\n")[0]
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "mpi": " ".join(library.split()),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__ if torch is not None else "",
        "gpu": torch.cuda.get_device_name() if torch is not None and torch.cuda.is_initialized() else "",
    }


def processor() -> str:
    """Return the name of the processor, or of its architecture where the system tells no more."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

"""Which machine and which libraries the numbers of a run depend on."""

from __future__ import annotations

import os
import platform
import re
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
    known = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", known.read_text()) if known.exists() else [platform.processor()]
    return "".join(names[:1]) or platform.machine()

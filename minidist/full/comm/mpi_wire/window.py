"""Windows: memory that the processes of one machine share, as the `mpi` wire allocates it.

    rank 0       makes a file in memory, without a name  ─┐ roll call: where it is
    every rank   reserves its own part, maps all parts   ─┘ roll call: did it work?

MPI-3 has windows, too (Hoefler et al. 2013), but all ranks must free one together, and Python lets
go of an array at another moment on every rank. A mapping ends on each rank alone, with the last
array over it, and the file ends with the last mapping. Nor does it lie in /dev/shm, which is 64 MB
in a container and ends a job that fills it with a bus error: here memory is reserved before it is
touched, and if there is none, all ranks are told so.
"""

import ctypes
import mmap
import os
import weakref
from typing import Any

import numpy as np

from minidist.full.comm.wire import Wire

AVAILABLE = hasattr(os, "memfd_create")  # on Linux


def open_window(wire: Wire, bytes: int) -> list[Any]:
    """Return every rank's memory of so many bytes, zeroed, as this rank sees it. Collective.

    Raises
    ------
    MemoryError
        On every rank, if one of them cannot have its memory, or does not see that of the others.
    """
    part = -(-bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    made = os.memfd_create("minidist window") if wire.rank == 0 else -1
    place = wire.all_gather_object((os.getpid(), made, made >= 0 and os.fstat(made).st_ino))[0]
    problem = ""
    try:
        whole = _join(place, part, wire)
    except OSError as error:
        problem = f"rank {wire.members[wire.rank]}: {error}"
    problems = [problem for problem in wire.all_gather_object(problem) if problem]
    if made >= 0:
        os.close(made)
    if problems:
        raise MemoryError(
            f"the {wire.size} ranks of this machine cannot have {bytes} bytes of shared memory "
            f"each ({problems[0]}): give the machine or container more memory, start fewer ranks "
            "on it, or make model and buckets smaller; and start all its ranks in one container"
        )
    return [whole[rank * part : rank * part + bytes] for rank in range(wire.size)]


def _join(place: tuple[int, int, int], part: int, wire: Wire) -> Any:
    """Reserve this rank's part of the file at `place` (process, its number for the file, inode),
    and map all of it.
    """
    with open(f"/proc/{place[0]}/fd/{place[1]}", "r+b", buffering=0) as file:
        if os.fstat(file.fileno()).st_ino != place[2]:
            raise OSError(f"process {place[0]} is another one here")
        os.posix_fallocate(file.fileno(), wire.rank * part, part)
        whole = _map(file.fileno(), wire.size * part)
    # each rank touches its own pages first, so they lie near its core
    whole[wire.rank * part :][:part] = 0
    return whole


def _map(file: int, bytes: int) -> Any:
    """Map a file as an array. Python's `mmap` would keep it open, and a model has more windows than
    that allows.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, size = ctypes.c_void_p, ctypes.c_size_t(bytes)
    start = libc.mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, ctypes.c_long(0)
    )
    if start == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_ubyte * bytes).from_address(start)
    # Not at the end of the program, when other threads may still read it.
    weakref.finalize(memory, libc.munmap, ctypes.c_void_p(start), size).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8)

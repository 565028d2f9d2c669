"""`python -m minidist health`, under mpirun, torchrun or srun: is every rank's machine fit to train?

Each rank is asked the same before the start, and they are compared:

    memory     free, of the GPU or of the machine
    product    of two matrices: is it right, and how fast
    disk       can the folder of checkpoints be written, and how fast
    ring       a message to the next rank and one from the one before: is it right, and how fast

A faulty machine gives wrong numbers, has no room, or is much slower than the others. Machines are
equal, and none is fast by a fault: so the median says what is usual, and where it lies between two
values, as with two machines, the better one. (MegaScale, Jiang et al. 2024, section 4.3, runs such
checks before each start.)
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median_high, median_low
from typing import Any, NamedTuple

import numpy as np

from minidist.full.comm import Communicator, init
from minidist.full.comm.errors import CommunicationError
from minidist.full.launch.parser import Parser

SLOW = 2.0  # times as long as the median: what a busy machine does is less
SIDE = 512  # of the matrices
BYTES = 4 << 20  # of a message, and of a file
REPEATS = 5  # the fastest counts
LITTLE = 0.5  # of the median of what is free


class Checked(NamedTuple):
    """What one rank has found. Seconds; None: it was not asked for.

    Attributes
    ----------
    host : str
    free : float
        Bytes of memory.
    product, ring, disk : float or None
        The fastest of some.
    faults : tuple of str
        What is wrong by itself.
    """

    host: str
    free: float
    product: float
    ring: float | None
    disk: float | None
    faults: tuple[str, ...]


def main(argv: Sequence[str]) -> int:
    """Check, and say on rank 0 which ranks are not fit; return 1 if some are not."""
    parser = Parser(prog="minidist health", description="Which rank's machine is not fit to train.")
    parser.add_argument("--save", default="", help="folder of checkpoints; none: leave it out")
    options = parser.parse_args(argv)
    comm = init()
    wrong = check(comm, options.save)
    if comm.rank == 0:
        fit = "1 rank is fit" if comm.size == 1 else f"{comm.size} ranks are fit"
        print("\n".join(wrong) or fit, flush=True)
    return 1 if wrong else 0


def check(comm: Communicator, folder: str = "") -> list[str]:
    """Return what is wrong, a line for each rank that is not fit; nothing if all are. Collective.

    Parameters
    ----------
    folder : str
        Where checkpoints are to be written; "" leaves the disk out.
    """
    faults: list[str] = []
    seconds = [_asked(faults, ask) for ask in (_product, lambda: _disk(folder) if folder else None)]
    ring = _asked(faults, lambda: _ring(comm))
    mine = Checked(
        socket.gethostname(),
        _free(),
        seconds[0] or 0.0,
        ring,
        seconds[1],
        tuple(faults),
    )
    return judge(comm.all_gather_object(mine))


def judge(all: Sequence[Checked]) -> list[str]:
    """Return a line for each rank that is not fit, given what all have found."""
    found: list[list[str]] = [list(each.faults) for each in all]
    for what in ("product", "ring", "disk"):
        taken = [getattr(each, what) for each in all]
        usual = median_low([seconds for seconds in taken if seconds] or [0.0])
        for rank, seconds in enumerate(taken):
            if seconds and seconds > SLOW * usual:
                times = f"{seconds / usual:.1f} times as long as the median of {usual * 1e3:.1f} ms"
                found[rank].append(f"its {what} takes {times}")
    usual = median_high(each.free for each in all)
    for rank, each in enumerate(all):
        if each.free < LITTLE * usual:
            room = f"{each.free / 1e9:.1f} GB of memory are free, of usually {usual / 1e9:.1f}"
            found[rank].append(room)
    return [
        f"rank {rank} on {each.host}: {'; '.join(wrong)}"
        for rank, (each, wrong) in enumerate(zip(all, found, strict=True))
        if wrong
    ]


def _asked(faults: list[str], ask: Callable[[], float | None]) -> float | None:
    """Return what `ask` finds; note what is wrong instead."""
    try:
        return ask()
    except (OSError, ArithmeticError, CommunicationError) as error:
        faults.append(str(error))
        return None


def _fastest(do: Callable[[], Any]) -> float:
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        do()
        taken.append(time.perf_counter() - began)
    return min(taken)


def _product() -> float:
    """Multiply whole numbers, whose product has no rounding, on the GPU if there is one."""
    ones = np.arange(SIDE * SIDE, dtype=np.float32).reshape(SIDE, SIDE) % 7
    expected = (ones.astype(np.float64) @ ones.astype(np.float64)).astype(np.float32)
    found: list[Any] = []
    if (torch := _torch_with_gpu()) is not None:
        left = torch.from_numpy(ones).cuda()

        def multiply() -> None:
            found[:] = [(left @ left).cpu().numpy()]
    else:

        def multiply() -> None:
            found[:] = [ones @ ones]

    seconds = _fastest(multiply)
    if not np.array_equal(found[0], expected):
        wrong = int((found[0] != expected).sum())
        raise ArithmeticError(f"its product of two matrices is wrong in {wrong} places")
    return seconds


def _disk(folder: str) -> float:
    """Write a file and read it again."""
    data = os.urandom(BYTES)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path) as file:

        def write() -> None:
            file.seek(0)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

        seconds = _fastest(write)
        if Path(file.name).read_bytes() != data:
            raise ArithmeticError(f"{folder} gives back other bytes than were written")
    if shutil.disk_usage(path).free < 10 * BYTES:
        raise OSError(f"{folder} has no room")
    return seconds


def _ring(comm: Communicator) -> float | None:
    """Send to the next rank, and receive from the one before."""
    if comm.size == 1:
        return None
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    leaving = np.full(BYTES // 8, comm.rank, np.int64)
    arriving = np.empty_like(leaving)
    seconds = _fastest(lambda: comm.exchange(leaving, to, arriving, source))
    if not (arriving == source).all():
        raise ArithmeticError(f"what came from rank {source} is not what it sent")
    return seconds


def _free() -> float:
    """Return the bytes of memory that are free: of the GPU, or of the machine."""
    if (torch := _torch_with_gpu()) is not None:
        return float(torch.cuda.mem_get_info()[0])
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _torch_with_gpu() -> Any:
    """Return torch if ranks have a GPU, which it has found out by now."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None

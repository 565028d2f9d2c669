"""How fast this machine copies memory, which bounds every message between two of its ranks.

    own core     256 KiB, which stay in a core's cache; all ranks copy at the same time
    memory       64 MiB, too large for any cache; all ranks copy at the same time
    other core   1 MiB that the other rank has just written, through the shared window

Virtual machines move between hosts' cores that share a cache and cores that do not: the last number
flips between about 45 GB/s (*near*) and 25 GB/s (*far*), and with it every ratio. The bounds are
for the near state.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from minidist.bench.measure import timed
from minidist.bench.subject import Counted, Setting, subject
from minidist.full.comm import Communicator

BLOCK = 1 << 20
ROUNDS = 15
NEAR = 35.0  # GB/s of copying from the other core, between the two states


def state(gigabytes: float) -> str:
    """Name the state in which a block of the other core is copied at this speed."""
    return "near" if gigabytes >= NEAR else "far"


@subject(gloo=False)
def copy(setting: Setting) -> Iterator[Counted]:
    """Billions of bytes copied in a second, in the three ways; `setting.when` names the probe. No
    peer, no bound.
    """
    comm, case = setting.comm, f"{setting.launch} {setting.when}"
    for name, bytes, iterations in (("own core", 256 << 10, 500), ("memory", 64 << 20, 1)):
        source, target = np.full(bytes, 1, np.uint8), np.full(bytes, 0, np.uint8)
        seconds = [
            timed(partial(np.copyto, target, source), comm, iterations) for _ in range(ROUNDS)
        ]
        yield Counted(case, {name: [bytes / s / 1e9 for s in seconds]}, "GB/s", bytes)
    mine = comm.allocate(BLOCK, np.uint8)
    windows = comm.peers(mine)
    if windows is not None:
        values = [BLOCK / _copy_from_neighbour(windows, comm) / 1e9 for _ in range(2 * ROUNDS)]
        yield Counted(case, {"other core": values}, "GB/s", BLOCK)


def _copy_from_neighbour(windows: list[Any], comm: Communicator) -> float:
    """Rank 1 reads what rank 0 has just written, then the other way round; return the slower one's
    seconds.
    """
    slowest = 0.0
    target = np.full(BLOCK, 0, np.uint8)
    for writer, reader in ((0, 1), (1, 0)):
        if comm.rank == writer:
            windows[writer][:] = 1
        comm.fence()
        started = time.perf_counter()
        if comm.rank == reader:
            np.copyto(target, windows[writer])
        seconds = time.perf_counter() - started
        slowest = max(slowest, *comm.all_gather_object(seconds))
    return slowest

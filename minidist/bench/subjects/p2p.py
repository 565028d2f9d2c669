"""One message there, and one back: how long a message between two ranks takes."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from minidist.bench.measure import Run
from minidist.bench.options import size_text
from minidist.bench.subject import Case, Setting, subject


@subject(peers=("native", "gloo"), rounds=15)
def p2p(setting: Setting) -> Iterator[Case]:
    """Seconds of half a round trip between ranks 0 and 1, while the other ranks look on. No bound."""
    comm = setting.comm
    mpi = comm.wire.mpi  # type: ignore[attr-defined]
    for bytes in (8, *setting.options.sizes):
        array = np.zeros(bytes, np.uint8)
        runs = {"send": ping_pong(comm.send, comm.recv, comm.rank, array)}
        if "native" in setting.options.peers:
            runs["native"] = ping_pong(mpi.Send, mpi.Recv, comm.rank, array)
        if setting.gloo is not None:
            import torch

            runs["gloo"] = ping_pong(setting.gloo.send, setting.gloo.recv, comm.rank, torch.from_numpy(array))
        yield Case(size_text(bytes), runs, bytes, units=2)


def ping_pong(send: Callable[[Any, int], object], receive: Callable[[Any, int], object], rank: int, array: Any) -> Run:
    """Return a round trip."""

    def there_and_back() -> None:
        if rank == 0:
            send(array, 1)
            receive(array, 1)
        elif rank == 1:
            receive(array, 0)
            send(array, 0)

    return there_and_back

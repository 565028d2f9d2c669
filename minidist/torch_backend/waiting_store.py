"""torch's key-value store for simulated ranks: who waits for a value waits as for a message.

    store.get("port") of rank 1      the value, once rank 0 has set it
    nobody will set it               DeadlockError with this line, and not a wait of five minutes
    one rank runs at a time          the others go on meanwhile

torch's own store waits in C++, where nobody sees it. Here it holds the values, and no more. A wait
with a `timeout` of its own ends with that, as torch's does. `set_timeout` has no effect: each
`init_process_group` calls it, and how long a rank may wait is the job's `limit`, here as well.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from minidist.full.comm.communicator import Communicator
from minidist.full.comm.ledger import Awaited
from minidist.torch_backend.ranks import RANKS

TIMEOUT = timedelta(minutes=5)  # torch's
LOOKS = 1e-3  # seconds between two looks of who cannot be woken


class WaitingStore(Store):
    """A store of the ranks that are threads of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.values = HashStore()
        self.waiting: list[Communicator] = []

    # ---------------------------------------------------------------- what waits

    def get(self, key: str) -> bytes:
        """Return a value once it is there."""
        self.wait([key])
        return self.values.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return values once all are there."""
        self.wait(keys)
        return [self.values.get(key) for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values.

        Raises
        ------
        DeadlockError
            If nobody can set them any more.
        DistStoreError
            If a `timeout` was asked for and is over.
        """
        names = [*keys]
        rank = RANKS.simulated()
        if self.values.check(names):
            return
        if rank is None or RANKS.beside() or timeout is not None:
            self._look_again_and_again(names, timeout)
            return
        comm = rank.comm
        self.waiting.append(comm)
        try:
            own = [repr(name.rpartition("//")[2]) for name in names]  # a PrefixStore's are longer
            what = f"the store's {', '.join(own)}"
            others = tuple(rank for rank in comm.members if rank != comm.members[comm.rank])
            with comm.ledger.status.awaiting(Awaited(what, others), comm.clock()):
                comm.wire.wait_until(lambda: self.values.check(names), what, others=True)
        finally:
            self.waiting.remove(comm)

    def _look_again_and_again(self, keys: list[str], timeout: timedelta | None) -> None:
        rank = RANKS.simulated()
        over = time.monotonic() + (timeout or TIMEOUT).total_seconds()
        while not self.values.check(keys):
            if time.monotonic() > over:
                raise dist.DistStoreError(f"wait timeout, for keys {', '.join(keys)}")
            if rank is not None:
                rank.comm.hand_over()  # which raises once the job has failed
            time.sleep(LOOKS)

    # ---------------------------------------------------------------- what is set

    def set(self, key: str, value: Any) -> None:
        """Set a value."""
        self.values.set(key, value)
        self._wake()

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins at 0; return it."""
        total = self.values.add(key, amount)
        self._wake()
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a value if it is the expected one; return what it is now."""
        value = self.values.compare_set(key, expected, desired)
        self._wake()
        return value

    def append(self, key: str, value: Any) -> None:
        """Add to the end of a value."""
        values: Any = self.values  # which can more than its stub says
        values.append(key, value)
        self._wake()

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Set several values."""
        for key, value in zip(keys, values, strict=True):
            self.values.set(key, value)
        self._wake()

    def _wake(self) -> None:
        for comm in list(self.waiting):
            comm.wire.wake()

    # ---------------------------------------------------------------- what is asked

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all keys have values."""
        return self.values.check([*keys])

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return self.values.num_keys()

    def delete_key(self, key: str) -> bool:
        """Forget a key; return whether there was one."""
        return self.values.delete_key(key)

    def has_extended_api(self) -> bool:
        """Tell that it appends, and takes several keys at once."""
        return True

    def clone(self) -> Store:
        """Return the store itself, which all threads share."""
        return self

    # as C++ asks for them
    getNumKeys, deleteKey = num_keys, delete_key

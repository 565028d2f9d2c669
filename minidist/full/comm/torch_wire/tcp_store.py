"""The store of a job of processes: a small TCP server of torch's, in the launcher. See
`membership/store.py`.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

WITHIN = timedelta(seconds=10)  # for one operation
MOMENT = 0.02  # seconds between two looks


class TcpStore:
    """Texts by name, at an address `host:port`.

    Attributes
    ----------
    tcp : torch.distributed.TCPStore
    """

    def __init__(self, host: str, port: int, serve: bool = False) -> None:
        kind: Any = dist.TCPStore  # type: ignore[attr-defined]
        self.tcp = kind(host, port, is_master=serve, wait_for_workers=False, timeout=WITHIN)
        self.address = f"{host}:{self.tcp.port}"

    def read(self, name: str) -> str:
        """Return a text. One round trip: where there is none, an empty one is left."""
        return self.claim(name, "")

    def append(self, name: str, text: str) -> None:
        """Add to the end of a text."""
        self.tcp.append(f"members/{name}", text)

    def claim(self, name: str, text: str) -> str:
        """Write a text unless there is one; return the one that stands there."""
        found: bytes = self.tcp.compare_set(f"members/{name}", "", text)
        return found.decode()

    def wait(self) -> None:
        """Return after a moment."""
        time.sleep(MOMENT)

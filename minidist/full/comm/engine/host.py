"""Which machine is this? Only its own processes share memory."""

import socket
from pathlib import Path


def host() -> str:
    """Return what only processes of one machine have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # two containers may bear one name
    return socket.gethostname() + (boot.read_text() if boot.exists() else "")

"""One run at a time in a folder of checkpoints: who holds its lock may write there.

    runs/a/.lock     process 4711 on node7 since 2026-03-04 12:00:05      rank 0's, from its first write to its end

The operating system keeps the lock (flock), not the file: it is free the moment its process ends, also by `kill -9`,
so after a crash the next run starts at once. The file stays and says who had the lock last. NFS, and Lustre mounted
with `-o flock`, lock between machines too. On a file system without locks the run goes on and says so: nothing else
tells a run that is still going from one that was killed.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import IO

from minidist.trainer.checkpoint.store import CheckpointError
from minidist.trainer.files import reason

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"


def hold(folder: Path) -> IO[str]:
    """Take the lock of a folder; closing what is returned gives it back, and so does the end of this process.

    Raises
    ------
    CheckpointError
        If another run holds it: naming the process, its machine, and since when.
    OSError
        If the folder cannot be written.
    """
    file = (folder / LOCK).open("a+", encoding="utf-8", errors="replace")
    try:
        if fcntl is None:
            raise OSError("the system has none")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.readline().strip()[:200] or "another run"
        file.close()
        raise CheckpointError(
            f"--save {folder} is in use by {holder}: wait for its end, or save to another folder"
        ) from None
    except OSError as error:
        print(
            f"minidist train: {folder} cannot be locked ({reason(error)}): let no other run save there", file=sys.stderr
        )
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file

"""One run at a time in a folder of checkpoints: who holds its lock may write there.

    runs/a/.lock     rank 0 holds it, from its first write to its end

The operating system keeps the lock (flock), not the file: it is free the moment its process ends,
also by `kill -9`, so after a crash the next run starts at once. The file stays. NFS, and Lustre
mounted with `-o flock`, lock between machines too. On a file system without locks the run goes on
and says so: nothing else tells a run that is still going from one that was killed.
"""

import sys
from pathlib import Path
from typing import IO

from minidist.full.checkpoint.store import CheckpointError


def hold(folder: Path) -> IO[str]:
    """Take the lock of a folder; closing what is returned gives it back, and so does the end of
    this process.

    Raises
    ------
    CheckpointError
        If another run holds it.
    OSError
        If the folder cannot be written.
    """
    file = (folder / ".lock").open("a")
    try:
        lock_file(file)
    except (BlockingIOError, PermissionError):
        file.close()
        raise CheckpointError(
            f"--save {folder} is in use by another run: let it end, or save elsewhere"
        ) from None
    except OSError as error:
        said = (
            f"minidist train: {folder} cannot be locked ({error.strerror}): let no other run save "
            "there"
        )
        print(said, file=sys.stderr)
    return file


def lock_file(file: IO[str]) -> None:
    """Lock an open file, or raise OSError if another process has locked it."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl  # here, because Windows has none

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

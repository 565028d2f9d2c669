"""MPICH's own shared memory: a file in /dev/shm through which the ranks of one machine talk, 1.06
MB a rank.

    rank 0      makes the file when MPI starts  ─┐
    every rank  maps it                         ─┘ all have come to init(): its name is taken away, and nobody needs it

MPICH removes the file when MPI ends in order. A job that is aborted or killed leaves it, and a
container, whose /dev/shm has 64 MB, is full after some twenty of them. Without a name the file ends
with the last process that maps it, however that one ends. A job that dies before all ranks have
come to init() still leaves its file: `launch` removes it, and `doctor` finds those of bare
`mpirun`s. A file in use is known by the processes that map it, or have it open.
"""

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from minidist.full.comm.errors import LaunchError

FOLDER = Path("/dev/shm")
NAMES = "mpich_shm_*"
BYTES = 1_057_344  # a rank's part in MPICH 5.0; its start is touched on all ranks when MPI starts


def take_names_away() -> None:
    """Unlink the segments that this process maps. Call it when all ranks of the machine have
    started MPI.
    """
    for path in _mapped("self"):
        with suppress(OSError):  # another rank was faster
            path.unlink()


def segments() -> frozenset[Path]:
    """Return the segments that have a name."""
    return frozenset(FOLDER.glob(NAMES))


def left_behind(user: int, before: Collection[Path] = ()) -> list[Path]:
    """Return the segments of a user, other than some, that no process maps or has open: their jobs
    have died.

    A job that is just starting has its segment open from the moment in which it makes it.
    """
    found = segments() - set(before)
    mine = [path for path in found if _owner(path) == user]
    if not mine:
        return []
    used = in_use()
    return sorted(path for path in mine if path not in used)


def remove(paths: Collection[Path]) -> int:
    """Remove segments; return how many bytes that gave back."""
    freed = 0
    for path in paths:
        bytes = bytes_of([path])
        with suppress(OSError):
            path.unlink()
            freed += bytes
    return freed


def bytes_of(paths: Collection[Path]) -> int:
    """Return how many bytes of memory segments take."""
    total = 0
    for path in paths:
        with suppress(OSError):  # removed meanwhile
            total += path.stat().st_blocks * 512
    return total


def in_use() -> set[Path]:
    """Return the segments that processes map or have open, as far as /proc lets this one see."""
    used: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        used |= _mapped(process.name)
        with suppress(OSError):
            for descriptor in os.listdir(process / "fd"):
                with suppress(OSError):  # closed meanwhile
                    used.add(Path(os.readlink(process / "fd" / descriptor)))
    return used


def check_room() -> None:
    """Raise LaunchError if /dev/shm has no room for the segment of this job's ranks: touching it
    would kill them.

    A segment with a name that is in use counts as free: most likely a rank of this job was faster
    and made it.
    """
    ranks = int(os.environ.get("MPI_LOCALNRANKS", "1"))  # MPICH's launcher sets it
    if ranks < 2 or not FOLDER.exists():
        return
    needed, room = ranks * BYTES, os.statvfs(FOLDER)
    free = room.f_bavail * room.f_frsize
    if free < needed:
        free += bytes_of(in_use() & segments())
    if free < needed:
        raise LaunchError(
            f"{FOLDER} has {free / 1e6:.2f} MB free, but MPI's own messages between {ranks} ranks "
            f"need {needed / 1e6:.2f} MB there, and without it the system would kill them: start "
            "the container with docker run --shm-size=1g, or remove what dead jobs have left "
            "with `python -m minidist doctor --clean`"
        )


def _mapped(process: str) -> set[Path]:
    """Return the segments that a process maps."""
    try:
        lines = Path("/proc", process, "maps").read_text().splitlines()
    except OSError:  # it has ended, belongs to somebody else, or there is no /proc
        return set()
    prefix = f"{FOLDER}/{NAMES.rstrip('*')}"
    paths = (line[line.index("/") :] for line in lines if prefix in line)
    return {Path(path) for path in paths if path.startswith(prefix)}


def _owner(path: Path) -> int | None:
    with suppress(OSError):
        return path.stat().st_uid
    return None

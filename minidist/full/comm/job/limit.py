"""What the environment says: numbers of the launcher, and how long one operation may wait."""

import os

from minidist.full.comm.errors import LaunchError
from minidist.full.options import SECONDS, read_number

LIMIT = 300.0  # seconds
MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def first_set(*names: str) -> str:
    """Return the first of these variables that is set, or nothing."""
    return next((os.environ[name] for name in names if name in os.environ), "")


def time_limit(wanted: float | None) -> float:
    """Return `wanted`; if it is None, what the environment variable MINIDIST_LIMIT says, or 300
    seconds.

    Raises
    ------
    LaunchError
        If it is no time.
    """
    written = os.environ.get("MINIDIST_LIMIT", LIMIT) if wanted is None else wanted
    try:
        return read_number(written, float, SECONDS)
    except ValueError as error:
        raise LaunchError(
            f"{'MINIDIST_LIMIT' if wanted is None else 'limit'}={written} {error}"
        ) from None

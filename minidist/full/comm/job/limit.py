"""How long one operation may wait: as the caller says, or the environment."""

import os

from minidist.full.comm.errors import LaunchError
from minidist.full.options import SECONDS, read_number

LIMIT = 300.0  # seconds


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

"""Words about a rank that waits: what for, and on which line. All wires report alike."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).parents[1])


def describe(what: str, peer: int, tag: int, bytes: int) -> str:
    """Say what is waited for: `receive from rank 1 (tag 0, 64 bytes)`."""
    from minidist.comm.communicator import TAGS

    label = f"tag {tag}" if tag < TAGS else "inside a collective"
    return f"{what} rank {peer} ({label}, {bytes} bytes)"


def user_line(frame: FrameType | None) -> str:
    """Return ` in all_reduce at file.py:12 in main`: the collective under way, and who called the package."""
    innermost, inside, entered = frame, "", False
    while frame is not None and not (entered and not _in_package(frame)):
        entered = entered or _in_package(frame)
        name = frame.f_code.co_name
        if Path(frame.f_code.co_filename).parent.name == "collectives" and not name.startswith("_"):
            inside = f" in {name}"
        frame = frame.f_back
    caller = frame or innermost
    if caller is None:
        return inside
    return f"{inside} at {Path(caller.f_code.co_filename).name}:{caller.f_lineno} in {caller.f_code.co_name}"


def _in_package(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE)


def marked_traceback(rank: int, error: BaseException) -> str:
    """Return the traceback as one text, `[rank 2]` in front of every line."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "".join(f"[rank {rank}] {line}\n" for line in lines)

"""Words about a rank that waits: what for, and on which line. All wires report alike."""

import threading
import traceback
from pathlib import Path
from types import FrameType

TAGS = 1 << 20  # users' tags are below; the package's own messages travel on tags above
PACKAGE = str(Path(__file__).parents[1])


def label(tag: int) -> str:
    """Return `tag 5`, or for the package's own messages, `inside a collective`."""
    return f"tag {tag}" if tag < TAGS else "inside a collective"


def user_line(frame: FrameType | None) -> str:
    """Return ` in all_reduce at file.py:12 in main`: the collective under way, and who called the package."""
    caller, inside, entered = frame, "", False
    while caller is not None and not (entered and not _in_package(caller)):
        entered = entered or _in_package(caller)
        name = caller.f_code.co_name
        if Path(caller.f_code.co_filename).parent.name == "collectives" and not name.startswith("_"):
            inside = f" in {name}"
        caller = caller.f_back
    caller = caller if entered else frame  # it computes
    if caller is None or caller.f_code.co_filename == threading.__file__:
        return inside  # a stream's thread: nobody called the package there
    return f"{inside} at {Path(caller.f_code.co_filename).name}:{caller.f_lineno} in {caller.f_code.co_name}"


def _in_package(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE)


def marked_traceback(rank: int, error: BaseException) -> str:
    """Return the traceback as one text, `[rank 2]` in front of every line."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "".join(f"[rank {rank}] {line}\n" for line in lines)

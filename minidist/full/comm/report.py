"""Words about a rank that waits: what for, and on which line. All wires report alike."""

import os
import sys
import traceback
from pathlib import Path
from types import FrameType

from minidist.full.trace.lines import PACKAGE, of_a_user

FULL = f"full{os.sep}"
TAGS = 1 << 20  # users' tags are below; the package's own messages travel on tags above
# the package's pages and folders that wait on behalf of the others
MESSAGES = ("comm", "ring", "collectives", "torch_backend")


def label(tag: int) -> str:
    """Return `tag 5`, or for the package's own messages, `inside a collective`."""
    return f"tag {tag}" if tag < TAGS else "inside a collective"


def user_line(frame: FrameType | None) -> str:
    """Return ` in all_reduce at file.py:12 in main`: the collective under way, and the line of the
    user's own program.

    That is the innermost frame which is neither the package's nor a library's. A command has none:
    there it is the package's own line above messages and collectives.
    """
    inside, own = "", None
    while frame is not None and not of_a_user(frame.f_code.co_filename):
        folder, name = _folder(frame), frame.f_code.co_name
        if folder in ("ring", "collectives") and not name.startswith("_"):
            inside = f" in {name}"
        if own is None and folder not in ("", *MESSAGES):
            own = frame
        frame = frame.f_back
    line = frame or own
    if line is None:
        return inside  # a stream's thread: nobody called the package there
    return (
        f"{inside} at {Path(line.f_code.co_filename).name}:{line.f_lineno} in {line.f_code.co_name}"
    )


def _folder(frame: FrameType) -> str:
    """Return the name of the package's folder or page that a frame belongs to, or ""."""
    file = frame.f_code.co_filename
    if not file.startswith(PACKAGE):
        return ""
    return file.removeprefix(PACKAGE).removeprefix(FULL).split(os.sep)[0].removesuffix(".py")


def marked_traceback(rank: int, error: BaseException) -> str:
    """Return the traceback as one text, `[rank 2]` in front of every line."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "".join(f"[rank {rank}] {line}\n" for line in lines)


def tell(text: str) -> None:
    """Write to this process's standard error, at once.

    Not to `sys.stderr`: torch.distributed wraps `sys.excepthook`, collects there what the hook says,
    and prints it when the hook returns, which one that ends the process does not.
    """
    stream = sys.__stderr__ or sys.stderr
    stream.write(text)
    stream.flush()

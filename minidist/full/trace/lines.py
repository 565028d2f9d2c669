"""Which line of a program an event came from: the innermost that its user has written.

loss.backward()          a user's                  ◀── this one
  torch/_tensor.py       a library's
  minidist/full/...  the package's own
"""

import os
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).parents[2]) + os.sep
# Python's own library: a folder, or in a browser a zip
STDLIB = os.path.dirname(traceback.__file__)
LIBRARY = (STDLIB + os.sep, sysconfig.get_path("platstdlib") + os.sep)
INSTALLED = {"site-packages", "dist-packages"}


def source_line() -> str:
    """Return `file.py:12 in name` of the innermost caller that is neither the package's nor a
    library's, or "" on a thread of the package.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not of_a_user(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{file_name(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def of_a_user(file: str) -> bool:
    """Tell whether a source file is neither the package's nor a library's."""
    return not of_a_library(file) and not file.startswith(PACKAGE)


@cache
def of_a_library(file: str) -> bool:
    """Tell whether a file is Python's own, or of an installed package."""
    own = file.startswith((*LIBRARY, "<frozen"))
    return own or not INSTALLED.isdisjoint(Path(file).parts)


def file_name(file: str) -> str:
    """Return the name of a source file of the program; a notebook's cells share one name."""
    path = Path(file)
    return (
        "this notebook"
        if path.parent.name.startswith("ipykernel_") or file.startswith("<ipython")
        else path.name
    )

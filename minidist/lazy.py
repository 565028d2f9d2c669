"""Names that a package imports when they are asked for, and not before.

`minidist.parallel` and `minidist.model` export names that need torch beside files that do not. If
the package imported all of its names at once, nobody could plan a pipeline without torch.
"""

from collections.abc import Callable
from importlib import import_module


def names_in(module: str) -> Callable[[str], object]:
    """Return a package's `__getattr__`, which Python calls for a name that the package does not
    have: it finds the name in `module`.

    No file of the package may be called like one of these names: Python would put the file in the
    place of that name as soon as somebody imports it.

    Source: PEP 562.
    """
    return lambda name: getattr(import_module(module), name)

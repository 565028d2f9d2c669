"""torch's functions whose *first* call must not be made by two threads at the same time.

MKL computes them on a CPU, and finds out which of its kernels to take when a function is called for
the first time. A second thread that calls it meanwhile may get one that is right to nine digits
only, without a word (torch's issue 188792; 4 of 6,000 fresh processes on two cores). Ranks that are
threads compute the same at about the same time: therefore the functions are called once before.

`record_function`, which DDP's forward pass enters, imports a module when it is entered for the first
time. On a rank inside a compiled program that import holds Python's lock of all imports, and waits
for torch.compile's, while another rank holds that one, and is about to import something.
"""

import sys
from typing import Any

FUNCTIONS = (
    *("exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("erf", "erfc", "erfinv", "lgamma"),
)


def call_once() -> None:
    """Call them on one number, of each dtype that MKL has, if torch is imported at all."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(number)
    with torch.autograd.profiler.record_function("for the first time"):
        pass

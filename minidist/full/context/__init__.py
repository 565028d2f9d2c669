"""Long sequences: attention that never holds its T x T weights, and tokens shared out among ranks.

    the book                  here
    pass_on                   `Ring.hop`: on a stream, begun before a block is met, and awaited after
    attend                    `meet` (`blocks.py`); who meets whom: `meeting` in `order.py`
    attend_backward           `meet_backward`; `Ring.home` passes the gradients on
    causal                    `Meeting`, in zigzag order half of a block: all ranks compute as much in each hop
    context_parallel          `parallelize_context`, for any model

Read `minidist/context.py` first, then `order.py` (which tokens a rank has) and the first half of
`blocks.py` (how partial results merge). `ring.py` overlaps the page's ring, `gathered.py` and
`ulysses.py` are two other ways, and `context_parallel.py` applies one of them to a model, whose own
attention `probe.py` has tried out before. With a window or documents, `in_sight.py` sends only what
is seen. What computes a block is `flash.py`, whose first functions are flash attention, forward and
backward, on a page; `kernels/` has their loops for a GPU.

`options.py` has what a user can ask for; the number of ranks, `--cp`, stands with those of all axes
in `full/trainer/options.py`. What does not fit is refused by `ContextParallelism.faults` and `check`
(`context_parallel.py`), heads by `heads_fault` (`ulysses.py`). `options.py` needs no torch, so the
names that are exported stand in `exports.py`, which is imported when one of them is asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minidist.full.context.exports import *
else:
    from importlib import import_module

    def __getattr__(name):
        return getattr(import_module("minidist.full.context.exports"), name)

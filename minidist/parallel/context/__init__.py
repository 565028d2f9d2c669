"""Long sequences: attention that never holds its T x T weights, and tokens shared out among ranks.

Read `plain.py`, ring attention on a page, with `order.py` (which tokens a rank has) and the first
half of `blocks.py` (how partial results merge). `ring.py` overlaps it, `gathered.py` and
`ulysses.py` are two other ways, and `context_parallel.py` applies one of them to a model, whose own
attention `probe.py` has tried out before. What computes a block is `flash.py`, whose first
functions are flash attention, forward and backward, on a page; `flash_triton.py` has their loops as
kernels for a GPU.
"""

from minidist.parallel.context.context_parallel import parallelize_context, shard_tokens
from minidist.parallel.context.flash import flash_attention

__all__ = ["flash_attention", "parallelize_context", "shard_tokens"]

"""What `minidist.parallel.context` exports."""

from minidist.parallel.context.context_parallel import parallelize_context, shard_tokens
from minidist.parallel.context.flash import flash_attention

__all__ = ["flash_attention", "parallelize_context", "shard_tokens"]

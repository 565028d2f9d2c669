"""What `minidist.full.context` exports."""

from minidist.full.context.context_parallel import parallelize_context, shard_tokens
from minidist.full.context.flash import flash_attention

__all__ = ["flash_attention", "parallelize_context", "shard_tokens"]

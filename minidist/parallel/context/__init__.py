"""Long sequences: attention that never holds its T x T weights.

Read `flash.py`: its first functions are flash attention, forward and backward, on one page. Below stands what all else
calls, and the rule that chooses who computes.
"""

from minidist.parallel.context.flash import flash_attention

__all__ = ["flash_attention"]

"""Recomputation: backward runs parts of forward again instead of keeping what they saved.

Read `plain.py`, one page, then `segments.py`; `chain.py` finds the best plan under a budget of bytes.
"""

from minidist.memory.recompute.chain import Chain, Stage, best_plan, tradeoff
from minidist.memory.recompute.segments import best_interval, checkpoint, measure_block, recompute, segment

__all__ = [
    "Chain",
    "Stage",
    "best_interval",
    "best_plan",
    "checkpoint",
    "measure_block",
    "recompute",
    "segment",
    "tradeoff",
]

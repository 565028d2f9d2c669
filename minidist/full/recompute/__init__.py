"""Recomputation: backward runs parts of forward again instead of keeping what they saved.

Read `plain.py`, one page, then `segments.py`. The best plan under a budget of bytes is found by
`plan/memory/chain.py`.
"""

from minidist.full.recompute.segments import best_interval, checkpoint, measure_block, recompute

__all__ = ["best_interval", "checkpoint", "measure_block", "recompute"]

"""Recomputation: backward runs parts of forward again instead of keeping what they saved.

Read `plain.py`, one page, then `segments.py`. `chain.py` finds the best plan under a budget of
bytes.
"""

from minidist.full.recompute.segments import best_interval, checkpoint, measure_block, recompute

__all__ = ["best_interval", "checkpoint", "measure_block", "recompute"]

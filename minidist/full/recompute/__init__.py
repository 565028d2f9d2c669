"""Recomputation: backward runs parts of forward again instead of keeping what they saved.

    the book                  here
    checkpoint                `checkpoint` (`segments.py`): parameters need not be listed
    keep x                    `Inputs`: all tensors among the arguments
    the random generator      `Call`: those of the CPU and of all GPUs, and autocast
    function, recorded        `Call.run_again`, when autograd asks for the first of the tensors that it saved
    recompute_layers          `recompute`: each block, or segments of several, by a policy or a plan

Read `minidist/recompute.py` first, then `segments.py`. `plan/memory/chain.py` finds the best plan
under a budget of bytes.
"""

from minidist.full.recompute.segments import best_interval, checkpoint, measure_block, recompute

__all__ = ["best_interval", "checkpoint", "measure_block", "recompute"]

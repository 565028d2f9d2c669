"""The `threads` wire: simulated ranks, and a modelled cluster with a virtual clock.

Read `threads_wire.py` (a rank's side), then `world.py` (what the ranks share, and the proof of a
deadlock; `standstill.py` puts it in words), then `lanes.py` (one message, and its clock) with
`cluster.py` (what a message costs). `group.py` has what the ranks of a group share.
`first_calls.py` keeps torch exact when threads share it.

What carries the ranks is in `carriers/`: threads that all run at once, or tasks of which exactly
one runs.
"""

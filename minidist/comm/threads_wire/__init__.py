"""The `threads` wire: simulated ranks, and a modelled cluster with a virtual clock.

Read `threads_wire.py` (a rank's side), then `world.py` (what the ranks share, and the proof of a
deadlock), then `lanes.py` (one message, and its clock) with `cluster.py` (what a message costs).
`first_calls.py` keeps torch exact when threads share it.
"""

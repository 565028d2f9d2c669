"""Optimizers over slices of parameters: which are allowed, how their state is saved, and which
mistakes are refused.

Read `elementwise.py`, then `state.py`; `muon.py` is an optimizer that needs whole matrices.
`groups.py` reads parameter groups as torch's optimizers take them; `guard.py` refuses an optimizer
that would update a sharded model in vain.
"""

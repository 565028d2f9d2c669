"""Optimizers over slices of parameters: which are allowed, how their state is saved, and which
mistakes are refused.

Read `elementwise.py`, then `state.py`, and `over_slices.py`, which ZeRO 1 to 3 have: it builds and
checks the optimizers of a model's slices. `groups.py` reads parameter groups as torch's optimizers
take them; `guard.py` calls what refuses a step, before it is taken, that would not update a sharded
model.
"""

"""Optimizers over slices of parameters: which may be, how their state is saved, and what a mistake is told.

Read `elementwise.py`, then `state.py`; `muon.py` is one that needs whole matrices.
"""

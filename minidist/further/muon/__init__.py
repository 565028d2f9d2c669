"""Muon for models whose matrices ranks hold in parts.

Read `muon.py`: the owner of a matrix makes its change. `muon_with_adamw.py` uses it for some
parameters of a model, and `options.py` has what a user can ask for.
"""

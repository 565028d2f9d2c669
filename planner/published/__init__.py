"""Published runs: what was measured, what is predicted, and how constants were fitted.

Read `rows.py`, which makes a setup of a row, then `check.py`, which compares. `fit.py` chooses the fitted constants.
"""

"""Published runs: what was measured, and what is predicted.

Read `rows.py`, which makes a setup of a row, then `check.py`, which compares.

`tests/plan/fit.py` chose the fitted constants from such rows.
"""

"""The proof of the planner: published runs, predicted and compared, and how its constants were
fitted to them.

Read `fields.py`, what a row may say, `machines.py`, the machine that it names, and `rows.py`, which
makes a setup of a row, then `check.py`,
which compares (`python -m minidist plan check`). `fit.py` chooses the fitted constants. `tested_rows.json`
holds the rows that tests look at.
"""

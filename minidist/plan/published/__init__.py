"""The proof of the planner: published runs, predicted and compared, and how its constants were
fitted to them.

Read `fields.py`, what a row may say, `machines.py`, the machine that it names, and `rows.py`, which
makes a setup of a row, then `check.py`,
which compares (what papers computed themselves: `formulas.py`), and `report.py`, which prints tables
(`python -m minidist plan check`). `explain.py` asks what would explain the difference of one row (`plan
explain`), and `room.py` which of the runs would not fit, and why. `fit.py` chooses the fitted constants, and
`halves.py` those of half of the rows, to check them on the other half. `tested_rows.json`
holds the rows that tests look at.
"""

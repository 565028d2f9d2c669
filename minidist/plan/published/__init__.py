"""Published runs, predicted and compared: `python -m minidist plan check --rows FILE`.

Read `fields.py`, what a row may say, and `rows.py`, which makes a setup of a row; then `check.py`,
which compares (what papers computed themselves: `formulas.py`), and `report.py`, which prints tables.
The proof of the planner, with its rows and the script that fits constants to them, is
`tests/plan/published/`.
"""

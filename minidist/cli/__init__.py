"""Floor 6: commands, one to a file; `minidist/__main__.py` has the list of all, and calls them.

Read `train.py`. `train_checks.py` is what it asks of this machine before any work, its files and its memory (all other
checks of options are in `trainer/`); `together.py` has ranks start and stop as one; `summary.py` is what is printed at
the end. `stages.py` and `layouts.py` run several variants side by side, with `compare.py`. `export.py`, `launch.py` and
`doctor.py` stand alone. The commands `bench`, `grade` and `course` are in `bench/` and `course/`.
"""

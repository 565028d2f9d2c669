"""Floor 6: commands, one to a file; `minidist/__main__.py` has the list of all, and calls them.

Read `train.py`. `train_checks.py` checks the machine's files and memory before any work (all other
checks of options are in `trainer/`); `together.py` makes the ranks start and stop as one;
`summary.py` writes what is printed at the end, `profile.py` what torch's profiler saw. `variants/`
runs several variants of a run and compares them, and `picture.py` draws what was found. `plan/`
asks the planner. `export.py`, `launch.py` and `doctor.py` stand alone; `on_import.py` is what torch
calls when it is imported. The commands `bench`, `grade` and `course` are in `bench/` and `course/`.
"""

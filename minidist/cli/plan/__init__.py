"""`python -m minidist plan`: what is predicted, in words.

Read `command.py`, which asks the planner, then `here.py`, which compares it with this machine and tells `train` what it
predicts. `plan check`, beside published runs, is in `minidist/plan/published/`.
"""

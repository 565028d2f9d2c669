"""`python -m minidist plan`: what is predicted, in words.

Read `command.py`, which asks the planner; `runnable.py`, which makes a command of `train` of what
is found; `dry_run.py`, which asks `train` whether it takes the command; `answer.py`, what is
printed, with `between_sites.py` where there are several.
`as_published.py` plans named runs as they were published. `here.py` compares the planner with this
machine, and tells `train` what it predicts. Only `dry_run.py` and `here.py` need torch. `plan
check`, which looks at published runs, is in `minidist/plan/published/`.
"""

"""How far to trust a plan: the errors of runs of its kind, and what whole runs really took.

Read `kinds.py`, which gives an answer its range, by `errors.json`; then `runs.py`, named runs as they
were published: `plan/runs.toml` has their facts, `as_published.json` the hours that are planned for
them.
"""

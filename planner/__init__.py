"""Which layout, how long, how much: a planner, checked on published runs.

Read `device.py` and `model.py`, what is computed on what; then `compute.py` and `links.py`, how long each takes;
`step.py` and `held.py`, a step and a GPU of a run; `search.py` and `cost.py`, which run, and for how much. Tables
beside them (`constants.toml`, `devices.toml`, ...) hold every number with its source; `published/` compares predictions
with published runs, and `fit.py` shows how the fitted constants were chosen. `draw.py` draws.

It stands beside the package until that has room for it: `tests/test_house.py` keeps the ceiling.
"""

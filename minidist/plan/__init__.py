"""Floor 5: which layout, how long, how much: said before a run starts, or anything is rented.

Read `plain.py`, one page: a step, a GPU and a bill in closed form. Then `equation.py`, the formulas
of two papers for bytes; `device.py` and `model.py`, what is computed on what; `compute.py` and
`links.py`, how long each takes; `run.py`, `step.py`, `sent.py` and `held.py`: a run, its step, what
that sends, and what a GPU holds; `search.py` and `cost.py`, which run, and for how much. The tables
beside them (`constants.toml`, `devices.toml`, ...) hold every number with its source, and
`ranges.toml` says what a number may be. `python -m minidist plan` prints what is predicted, and
`plan check` compares it with published runs, which is in `published/`.
"""

from minidist.plan.equation import ModelStates, layer_activations, model_states

__all__ = ["ModelStates", "layer_activations", "model_states"]

"""Floor 5: which layout, how long, how much: said before a run starts, or anything is rented.

Read `plain.py`, a step, a GPU's bytes and the bill in closed form; `equation.py`, the formulas of two papers for bytes;
`device.py` and `model.py`, what is computed on what; `compute.py` and `links.py`, how long each takes; `step.py` and
`held.py`, step and bytes of a run; `search.py` and `cost.py`, which run, and for how much. The tables beside them
(`constants.toml`, `devices.toml`, ...) hold every number with its source. `chain.py` finds what to store and what to
recompute, so that a budget of bytes costs the least time. `python -m minidist plan` prints it all, and `plan check`
compares it with published runs.
"""

from minidist.plan.chain import Chain, Stage, best_plan, tradeoff
from minidist.plan.equation import ModelStates, layer_activations, model_states

__all__ = ["Chain", "ModelStates", "Stage", "best_plan", "layer_activations", "model_states", "tradeoff"]

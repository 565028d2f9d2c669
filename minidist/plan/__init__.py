"""Floor 5: what a run will need, said before it starts.

Read `equation.py`, the formulas of two papers for bytes. `chain.py` finds what to store and what to recompute, so that
a budget of bytes costs the least time. The planner, which predicts whole runs, is `planner/` beside the package.
"""

from minidist.plan.chain import Chain, Stage, best_plan, tradeoff
from minidist.plan.equation import ModelStates, layer_activations, model_states

__all__ = ["Chain", "ModelStates", "Stage", "best_plan", "layer_activations", "model_states", "tradeoff"]

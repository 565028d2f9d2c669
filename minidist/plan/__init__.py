"""Floor 5: what a run will need, said before it starts.

Read `equation.py`, the formulas of two papers for bytes, then `estimate.py`, which adds up what one GPU holds.
"""

from minidist.plan.equation import ModelStates, layer_activations, model_states
from minidist.plan.estimate import Estimate, estimate

__all__ = ["Estimate", "ModelStates", "estimate", "layer_activations", "model_states"]

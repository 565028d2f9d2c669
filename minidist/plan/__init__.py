"""Floor 5: what a run will need, said before it starts.

Read `equation.py`, the formulas of two papers for bytes, then `estimate.py`, which adds up what one GPU holds.
`chain.py` finds what to store and what to recompute, so that a budget of bytes costs the least time.
"""

from minidist.plan.chain import Chain, Stage, best_plan, tradeoff
from minidist.plan.equation import ModelStates, layer_activations, model_states
from minidist.plan.estimate import Estimate, estimate

__all__ = [
    "Chain",
    "Estimate",
    "ModelStates",
    "Stage",
    "best_plan",
    "estimate",
    "layer_activations",
    "model_states",
    "tradeoff",
]

"""Where the memory goes: counted, predicted by formula, and estimated before anything runs.

Read `account.py`, then `equation.py`, then `estimate.py`.
"""

from minidist.memory.account.account import Account
from minidist.memory.account.equation import ModelStates, layer_activations, model_states
from minidist.memory.account.estimate import Estimate, estimate

__all__ = ["Account", "Estimate", "ModelStates", "estimate", "layer_activations", "model_states"]

# task 3: keeps every unit whole from forward to backward: fewer bytes are sent, and the whole model is held.
from solution import *  # noqa: F403
from solution import HybridModel


class ShardedModel(HybridModel):
    def __init__(self, modules, comm):
        super().__init__(modules, comm, comm.size, reshard_after_forward=False)

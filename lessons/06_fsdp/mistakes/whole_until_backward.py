# task 3: keeps every unit whole from forward to backward: fewer bytes are sent, and the whole model is held.
from solution import *  # noqa: F403
from solution import ShardedModel


class ShardedModel(ShardedModel):
    def __init__(self, modules, comm):
        super().__init__(modules, comm, reshard_after_forward=False)

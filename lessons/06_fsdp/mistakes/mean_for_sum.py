# task 3: averages the gradients over the ranks where the sum is asked for.
from solution import *  # noqa: F403
from solution import HybridModel


class ShardedModel(HybridModel):
    def __init__(self, modules, comm):
        super().__init__(modules, comm, comm.size, op="mean")

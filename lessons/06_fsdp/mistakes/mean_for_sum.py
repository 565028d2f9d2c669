# task 3: averages the gradients over the ranks where the sum is asked for.
from solution import *  # noqa: F403
from solution import ShardedModel


class ShardedModel(ShardedModel):
    def __init__(self, modules, comm):
        super().__init__(modules, comm, op="mean")

# task 3: returns gradients in the order in which backward finds them, the last module's first.
import honest
from solution import *  # noqa: F403


class ShardedModel(honest.ShardedModel):
    def backward(self, gradient):
        return super().backward(gradient)[::-1]

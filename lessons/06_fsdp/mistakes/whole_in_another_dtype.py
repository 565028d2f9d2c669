# task 2: makes the tensor for the whole in torch's default dtype, so float64 parameters come back as float32.
import torch
from honest import ShardedUnit as Unit
from honest import views_into as right_views
from solution import *  # noqa: F403


class ShardedUnit(Unit):
    def __init__(self, module, comm):
        super().__init__(module, comm)
        parameters = list(module.parameters())
        self.whole = torch.empty(len(self.whole))
        for parameter, view in zip(parameters, right_views(self.whole, parameters), strict=True):
            parameter.data = view
        self.release()

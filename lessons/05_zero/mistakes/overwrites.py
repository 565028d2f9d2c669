# task 3: a slice's gradient becomes what came last, so of several backwards only the last one counts.
import solution
from solution import *  # noqa: F403

from minidist.full.collectives import reduce_scatter


class ZeRO2(solution.ZeRO1):
    def __init__(self, model, comm, lr):
        super().__init__(model, comm, lr)
        for parameter, mine in zip(model.parameters(), self.slices, strict=True):
            parameter.register_post_accumulate_grad_hook(
                lambda arrived, mine=mine: self.take(arrived, mine, comm)
            )

    def take(self, parameter, mine, comm):
        mine.grad = reduce_scatter(parameter.grad.flatten(), comm)
        parameter.grad = None

    def reduce(self):
        pass

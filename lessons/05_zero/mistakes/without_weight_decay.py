# task 2: is AdamW without its default weight decay.
import solution
from solution import *  # noqa: F403


class ZeRO1(solution.ZeRO1):
    def __init__(self, model, comm, lr):
        super().__init__(model, comm, lr)
        for group in self.adamw.param_groups:
            group["weight_decay"] = 0.0

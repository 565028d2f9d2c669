# task 3: launches all buckets once backward is over: fewer messages, but nothing is hidden behind computing.
import solution
from solution import *  # noqa: F403

from minidist.full.ddp.reducer import Reducer


class Late(Reducer):
    def launch_ready(self, all_of_them=False):
        if all_of_them:
            super().launch_ready(all_of_them)


class BucketedGradients(solution.BucketedGradients):
    def __init__(self, *args):
        super().__init__(*args)
        self.reducer.__class__ = Late

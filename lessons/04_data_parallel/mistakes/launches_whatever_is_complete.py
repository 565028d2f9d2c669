# task 3: launches buckets in the order in which this rank completes them: another rank's order mixes up their sums.
import solution
from solution import *  # noqa: F403

from minidist.full.ddp.reducer import Reducer


class Impatient(Reducer):
    def launch_ready(self, all_of_them=False):
        self.to_launch.sort(key=lambda bucket: not bucket.complete)
        super().launch_ready(all_of_them)


class BucketedGradients(solution.BucketedGradients):
    def __init__(self, *args):
        super().__init__(*args)
        self.reducer.__class__ = Impatient

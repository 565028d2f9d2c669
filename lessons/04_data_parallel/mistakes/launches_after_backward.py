# task 3: launches all buckets once backward is over: fewer messages, but nothing is hidden behind computing.
import solution
from solution import *  # noqa: F403


class BucketedGradients(solution.BucketedGradients):
    def _launch_ready(self, all_of_them=False):
        if all_of_them:
            super()._launch_ready(all_of_them)

# task 3: waits for a bucket where it launches it, so backward stands still until the bucket has travelled.
import solution
from solution import *  # noqa: F403


class BucketedGradients(solution.BucketedGradients):
    def _launch(self, bucket):
        handle = super()._launch(bucket)
        handle.wait()
        return handle

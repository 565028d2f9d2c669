# task 3: waits for a bucket where it launches it, so backward stands still until the bucket has travelled.
import solution
from solution import *  # noqa: F403


class BucketedGradients(solution.BucketedGradients):
    def launch(self, bucket):
        handle = super().launch(bucket)
        handle.wait()
        return handle

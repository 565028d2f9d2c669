# task 3: launches buckets in the order in which this rank completes them: another rank's order mixes up their sums.
import solution
from solution import *  # noqa: F403


class BucketedGradients(solution.BucketedGradients):
    def _launch_ready(self, all_of_them=False):
        for bucket in [*self.line]:
            if all_of_them or len(bucket.arrived) == len(bucket.parameters):
                self.line.remove(bucket)
                bucket.handle = self._launch(bucket)

# task 3: reduces every parameter by itself: more messages than buckets ask for.
import solution
from solution import *  # noqa: F403


class BucketedGradients(solution.BucketedGradients):
    def __init__(self, model, comm, stream, limit):
        super().__init__(model, comm, stream, limit=1)

# task 3: closes a bucket before a parameter that would not fit; it is to be closed once it holds the limit or more.
import honest
from solution import *  # noqa: F403


def assign_buckets(parameters, limit):
    buckets, held = [], 0
    for parameter in reversed(parameters):
        if not buckets or held + parameter.nbytes > limit:
            buckets.append([])
            held = 0
        buckets[-1].append(parameter)
        held += parameter.nbytes
    return buckets


class BucketedGradients(honest.BucketedGradients):
    def __init__(self, model, comm, stream, limit):
        super().__init__(model, comm, stream, limit)
        self.buckets = assign_buckets(list(model.parameters()), limit)
        self.number = {
            parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket
        }
        self.start_over()

# task 3: `finish` launches all buckets, one after the other, when backward has ended: nothing is hidden.
from functools import partial

import solution
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


class BucketedGradients:
    def __init__(self, model, comm, stream, limit):
        self.synchronising, self.stream = True, stream
        self.buckets = solution.assign_buckets(list(model.parameters()), limit)

    def finish(self):
        for bucket in self.buckets:
            flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
            work = partial(all_reduce, algorithm="ring")
            self.stream.launch(work, flat, self.stream.comm).wait()
            parts = flat.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad.copy_(part.view_as(parameter))

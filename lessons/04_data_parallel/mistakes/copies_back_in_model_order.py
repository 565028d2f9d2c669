# task 3: copies sums back in the model's order, where the bucket has the last parameter first.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


class BucketedGradients:
    def __init__(self, model, comm, stream, limit):
        self.synchronising, self.stream = True, stream
        self.buckets = assign_buckets(list(model.parameters()), limit)  # noqa: F405
        self.number = {
            parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket
        }
        self.start_over()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.arrived)

    def start_over(self):
        self.missing, self.launched = [len(bucket) for bucket in self.buckets], []

    def ready(self):
        return len(self.launched) < len(self.buckets) and self.missing[len(self.launched)] == 0

    def arrived(self, parameter):
        if self.synchronising:
            self.missing[self.number[parameter]] -= 1
            while self.ready():
                self.launch(self.buckets[len(self.launched)])

    def launch(self, bucket):
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        handle = self.stream.launch(all_reduce, flat, self.stream.comm, "sum", "ring")
        self.launched.append((flat, handle))

    def finish(self):
        for bucket in self.buckets[len(self.launched) :]:
            self.launch(bucket)
        for bucket, (flat, handle) in zip(self.buckets, self.launched, strict=True):
            handle.wait()
            for parameter, total in zip(
                bucket[::-1], flat.split([p.numel() for p in bucket[::-1]]), strict=True
            ):
                parameter.grad.copy_(total.view_as(parameter))
        self.start_over()

"""ZeRO 1 and 2: data parallelism in which each rank keeps the optimizer's state for a part of the parameters only.

    DDP      all-reduce gradients                                 ─▶ every rank updates all parameters
    ZeRO     reduce-scatter gradients ─▶ rank r updates shard r   ─▶ all-gather parameters

An all-reduce *is* a reduce-scatter and an all-gather, so nothing is sent that DDP would not send: 2 (P - 1)/P n bytes a
rank. Held are, of n bytes of parameters and of AdamW's 2 n of state:

             parameters     gradients                                        state
    DDP      n              n                                                2 n
    ZeRO-1   n              n, and n/P of the sum                            2 n/P
    ZeRO-2   n              n/P, and two buckets: one fills, one travels     2 n/P

(Rajbhandari et al. 2020, sections 5.1, 5.2 and 7.)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from minidist.collectives import all_gather, reduce_scatter
from minidist.comm import Communicator
from minidist.parallel.data.backward import Hook
from minidist.parallel.data.buckets import Bucket, FlatBucket, flat_buffer, take_gradients, views_into
from minidist.parallel.data.data_parallel import DDP, MIB
from minidist.parallel.sharded.shard import Shard, Sharded


class BucketShard(Shard):
    """This rank's part of a bucket, whose whole parameters lie in one flat buffer: gathering is one collective.

    Attributes
    ----------
    values : Tensor
        What the optimizer updates, flat: a view into the parameters, or a copy of them in the `master` dtype.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        names: dict[nn.Parameter, str],
        comm: Communicator,
        master: torch.dtype | None,
    ) -> None:
        super().__init__(parameters, names, comm)
        self.whole = flat_buffer(parameters, comm)
        for parameter, view in zip(parameters, views_into(self.whole, parameters), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.mine = self.whole[self.start : self.stop]
        self.values = self.mine.to(master or self.mine.dtype)
        self.make_slices(self.values)

    def publish(self, comm: Communicator) -> None:
        """Send this rank's updated values to all, and fetch theirs."""
        if self.values.dtype != self.mine.dtype:
            self.mine.copy_(self.values)
        all_gather(self.mine, comm, out=self.whole, counts=self.counts)


class ZeRO1(Sharded, DDP):
    """Sharded optimizer state. The gradients stay whole, as in DDP, in buckets that are reduce-scattered.

    Build the optimizer with `optimizer`; clip its gradients with `clip_by_global_norm(model.slices, ...)`.

    Parameters
    ----------
    model, comm, op, unused, bucket_bytes, first_bucket_bytes
        As for `DDP`.
    master : torch.dtype, optional
        Of the values that the optimizer updates, such as float32 where the model computes in bfloat16.
    overlap : bool
        Return from the optimizer's step while parameters are still being gathered; each module waits for its own when
        it is called. Pays where communication has its own hardware. Look at parameters only after `wait`.

    An optimizer over the parameters themselves, built before or after, raises ValueError when it steps.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        op: str = "sum",
        unused: bool = False,
        bucket_bytes: int = 25 * MIB,
        first_bucket_bytes: int = MIB,
        master: torch.dtype | None = None,
        overlap: bool = False,
    ) -> None:
        super().__init__(model, comm, op, unused, bucket_bytes, first_bucket_bytes)
        self.shards = {bucket: BucketShard(bucket.parameters, self.names, comm, master) for bucket in self.buckets}
        for shard in self.shards.values():
            shard.gradient = torch.zeros_like(shard.values)
        self.guard(self.parameters_to_reduce)
        self.gathering: dict[BucketShard, Any] = {}
        self.versions: dict[Bucket, int] = {}  # torch's count of changes, of gradients when they were reduced
        self.overlap = overlap
        if overlap:
            for module in model.modules():
                self.hooks.append(module.register_forward_pre_hook(Hook(self._pre_forward)))

    def slice_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the elements of a parameter that this rank updates, flat."""
        return self.shards[self.bucket_of[parameter]].slices[parameter]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        DDP.zero_grad(self, set_to_none)
        self.versions.clear()
        for shard in self.shards.values():
            shard.forget_gradients(shard.slices)

    def _forget(self, parameters: Collection[nn.Parameter], set_to_none: bool) -> None:
        for parameter in parameters:
            self.bucket_of[parameter].forget(parameter, set_to_none)
        for shard in self.shards.values():
            shard.forget_gradients(parameters)

    def held(self) -> dict[str, list[Tensor]]:
        """Return the tensors of this rank, by category of the account."""
        held = super().held()
        return held | {
            "gradients": [
                *held["gradients"],
                *(shard.gradient for shard in self.shards.values() if shard.gradient is not None),
            ]
        }

    def unwrap(self) -> nn.Module:
        """Return the model without hooks, to be changed and wrapped again."""
        self.unguard()
        return super().unwrap()

    def wait(self) -> None:
        """Return once all parameters are gathered."""
        for shard in self.shards.values():
            self._await(shard)

    def _launch(self, bucket: Bucket) -> Any:
        assert isinstance(bucket, FlatBucket)
        return self.stream.launch(self._reduce, bucket, bucket.flat)

    def _reduce(self, bucket: Bucket, gradients: Tensor) -> None:
        shard = self.shards[bucket]
        assert shard.gradient is not None
        shard.gradient.copy_(self._scattered(gradients))

    def _scattered(self, gradients: Tensor) -> Tensor:
        """Return this rank's shard of the sum of all ranks' gradients. Runs on the stream."""
        shard = reduce_scatter(gradients, self.stream.comm, self.op)
        assert isinstance(shard, Tensor)
        return shard

    def _backward_ended(self) -> None:
        super()._backward_ended()
        self.summed = False  # the buckets still hold this rank's own gradients: more can be added, and reduced again
        for shard in self.shards.values():
            shard.give_gradient(without=self.nowhere_used)
        self.versions = {bucket: bucket.flat._version for bucket in self.buckets if isinstance(bucket, FlatBucket)}

    def passed_over(self, parameter: nn.Parameter) -> bool:
        """Tell whether this parameter has a gradient that its slice does not have."""
        given, bucket = parameter.grad, self.bucket_of[parameter]
        if isinstance(bucket, FlatBucket) and self.versions.get(bucket) == bucket.flat._version:
            given = None if given is bucket.views[parameter] else given
        return given is not None and bool(given.any())

    def stepped(self, updated: Collection[nn.Parameter] | None = None) -> None:
        """Gather the new parameters, a bucket at a time: what ends an optimizer's step.

        With `updated`, only buckets that hold such parameters: what two optimizers have a part in is gathered twice.
        """
        for shard in self.shards.values():
            if updated is None or any(parameter in updated for parameter in shard.parameters):
                self.gathering[shard] = self.stream.launch(shard.publish, self.stream.comm)
        if not self.overlap:
            self.wait()

    def _await(self, shard: BucketShard) -> None:
        if shard in self.gathering:
            self.gathering.pop(shard).wait()

    def _pre_forward(self, module: nn.Module, _: object) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in self.bucket_of:
                self._await(self.shards[self.bucket_of[parameter]])


class ZeRO2(ZeRO1):
    """Sharded gradients too: a bucket's are reduce-scattered as soon as they are complete, and freed.

    Before a bucket is launched the one before it must have arrived: gradients are held of at most two. Arguments are
    those of `ZeRO1`. In `no_sync` the gradients stay whole, as there is nowhere to add them up.
    """

    def _bucket(self, parameters: list[nn.Parameter]) -> Bucket:
        return Bucket(parameters)

    def _launch(self, bucket: Bucket) -> Any:
        at = self.buckets.index(bucket)
        if at > 0:
            self.buckets[at - 1].handle.wait()
        return self.stream.launch(self._reduce, bucket, take_gradients(bucket.parameters))

    def _reduce(self, bucket: Bucket, gradients: Tensor) -> None:
        self.shards[bucket].add_gradient(self._scattered(gradients))

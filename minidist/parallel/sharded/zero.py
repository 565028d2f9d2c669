"""ZeRO 1 and 2: `plain.py` for any model, in buckets, and with overlap: gradients are reduced while
backward runs.

    DDP      all-reduce gradients                                 ─▶ every rank updates all parameters
    ZeRO     reduce-scatter gradients ─▶ rank r updates shard r   ─▶ all-gather parameters

    plain.py                          here
    PlainUnit                         a bucket (`data_parallel.py`), and its `BucketShard`
    reduce_scatter                    `_launch` and `_reduce`, on a stream
    the optimizer's step              of `optimizer(kind, ...)`, which is over `slices`
    unshard, in `step`                `stepped`, with which the optimizer's step ends

An all-reduce *is* a reduce-scatter and an all-gather, so ZeRO sends as much as DDP: 2 (P - 1)/P n
bytes a rank. With n bytes of parameters, and so 2 n bytes of AdamW's state, a rank holds:

             parameters     gradients                                        state
    DDP      n              n                                                2 n
    ZeRO-1   n              n, and n/P of the sum                            2 n/P
    ZeRO-2   n              n/P, and two buckets: one fills, one travels     2 n/P

(Rajbhandari et al. 2020, sections 5.1, 5.2 and 7.)
"""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minidist.collectives import all_gather, reduce_scatter
from minidist.comm import Communicator
from minidist.parallel.data.backward import Hook
from minidist.parallel.data.buckets import Bucket, flat_buffer, views_into
from minidist.parallel.data.data_parallel import Bucketed
from minidist.parallel.placement import copies_of
from minidist.parallel.sharded.shard import Links, Shard, Sharded, moved, place_of


class BucketShard(Shard):
    """This rank's part of a bucket. Its parameters are views into one flat buffer, which one
    all-gather fills.
    """

    def __init__(
        self, parameters: list[nn.Parameter], names: dict[nn.Parameter, str], comm: Communicator
    ) -> None:
        super().__init__(parameters, names, comm)
        self.whole = flat_buffer(parameters, comm)
        self.views = views_into(self.whole, parameters)
        for parameter, view in zip(parameters, self.views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.make_slices(self.whole[self.start : self.stop])

    def check_place(self) -> None:
        """Raise RuntimeError if a parameter has left the flat buffer, into which `publish`
        gathers.
        """
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if place_of(parameter) != place_of(view):
                raise RuntimeError(moved(self.placements[parameter].name, view, parameter))

    def publish(self, comm: Communicator) -> None:
        """Gather every rank's updated values: one all-gather. Runs on the stream."""
        all_gather(self.values, comm, out=self.whole, counts=self.counts)


class ZeRO1(Sharded, Bucketed):
    """Sharded optimizer state. The gradients stay whole in their buckets, as in DDP, and are
    reduce-scattered.

    Build the optimizer with `optimizer`; clip its gradients with `clip_by_global_norm(model.slices,
    ...)`, or with torch's `clip_grad_norm_(model.parameters(), ...)`: once reduced,
    `parameter.grad` is that of this rank's slice.

    Parameters
    ----------
    model, comm, *args, **options
        As for `DDP`: `op`, `unused`, `bucket_bytes` and `first_bucket_bytes`.
    overlap : bool
        Return from the optimizer's step while parameters are still being gathered; each module
        waits for its own when it is called. This pays where communication has its own hardware.
        Call `wait` before you read parameters.

    An optimizer over the parameters themselves raises ValueError when it steps. If the model
    computes in 16 bits, use `MasterWeights` as the optimizer: it updates values in 32 bits.
    """

    shard_of: dict[nn.Parameter, BucketShard]

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *args: Any,
        overlap: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model, comm, *args, **options)
        self.shards: dict[Bucket, BucketShard] = {}
        for bucket in self.buckets:
            shard = BucketShard(
                bucket.parameters, self.names, copies_of(bucket.parameters[0], comm)
            )
            shard.gradient = torch.zeros_like(shard.values)
            self.shards[bucket] = shard
        self.shard_of = {
            parameter: self.shards[bucket] for parameter, bucket in self.bucket_of.items()
        }
        self.guard(self.parameters_to_reduce)
        self.hooks.append(Links(self, self.parameters_to_reduce))
        self.gathering: dict[BucketShard, Any] = {}
        self.overlap = overlap
        if overlap:
            for module in model.modules():
                self.hooks.append(module.register_forward_pre_hook(Hook(self._pre_forward)))

    def held(self) -> dict[str, list[Tensor]]:
        """Return this rank's tensors by category, for `Account`: buckets and reduced shards are
        gradients.
        """
        reduced = [shard.gradient for shard in self.shards.values() if shard.gradient is not None]
        return {"gradients": super().held()["gradients"] + reduced}

    def wait(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Wait until all parameters, or these, are gathered."""
        for parameter in self.shard_of if parameters is None else parameters:
            shard = self.shard_of.get(parameter)  # None if it is frozen
            if shard in self.gathering:
                self.gathering.pop(shard).wait()

    def _launch(self, bucket: Bucket) -> Any:
        return self.stream.launch(self._reduce, self.shards[bucket], bucket.take(), bucket.link)

    def _reduce(self, shard: BucketShard, gradients: Tensor, link: Communicator) -> None:
        """Reduce all ranks' gradients to this rank's shard of their sum. Runs on the stream."""
        shard.add_gradient(reduce_scatter(gradients, link, self.op))
        self._empty(gradients)

    def _empty(self, gradients: Tensor) -> None:
        """Make the bucket zeros: the shard's gradient is the sum, and a next backward's come on
        top.
        """
        gradients.zero_()

    def _backward_ended(self) -> None:
        super()._backward_ended()
        for shard in self.shards.values():
            shard.give_gradient(without=self.nowhere_used)

    def passed_over(self, parameter: nn.Parameter) -> bool:
        """Tell whether this parameter has a gradient that its slice lacks."""
        given = self.waiting_gradient(parameter)
        return given is not None and bool(given.any())

    def waiting_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter that has come, and is still to be reduced."""
        return self.bucket_of[parameter].unreduced(parameter)

    def stepped(self, updated: Collection[nn.Parameter] | None = None) -> None:
        """Gather the new parameters, bucket by bucket. Each step of the optimizer ends with this.
        Collective.

        With `updated`, only the buckets of these parameters are gathered; one that two optimizers
        update, twice.
        """
        for bucket, shard in self.shards.items():
            if updated is None or any(parameter in updated for parameter in shard.parameters):
                self.gathering[shard] = self.stream.launch(shard.publish, bucket.link)
        if not self.overlap:
            self.wait()

    def _pre_forward(self, module: nn.Module, _: object) -> None:
        self.wait(module.parameters(recurse=False))


class ZeRO2(ZeRO1):
    """Sharded gradients, too: a bucket's gradients are reduce-scattered as soon as they are
    complete, and freed.

    A bucket is launched when the one before has been reduced, so a rank holds the gradients of two
    buckets at most. Arguments are those of `ZeRO1`. In `no_sync` the gradients stay whole and add
    up.
    """

    whole_gradients = False

    def _bucket(self, parameters: list[nn.Parameter], copies: Communicator) -> Bucket:
        return Bucket(parameters, self.links[copies])

    def _launch(self, bucket: Bucket) -> Any:
        if at := self.buckets.index(bucket):
            self.buckets[at - 1].handle.wait()
        return super()._launch(bucket)

    def _empty(self, gradients: Tensor) -> None:
        """Do nothing: these gradients are freed."""

"""ZeRO 1 and 2 for any model, in buckets: gradients are reduced while backward runs.

    DDP      all-reduce gradients                                 ─▶ every rank updates all parameters
    ZeRO     reduce-scatter gradients ─▶ rank r updates shard r   ─▶ all-gather parameters

An all-reduce *is* a reduce-scatter and an all-gather, so ZeRO sends as much as DDP: 2 (P - 1)/P n
bytes a rank. With n bytes of parameters, and so 2 n bytes of AdamW's state, a rank holds:

             parameters     gradients                                        state
    DDP      n              n                                                2 n
    ZeRO-1   n              n, and n/P of the sum                            2 n/P
    ZeRO-2   n              n/P, and two buckets: one fills, one travels     2 n/P

(Rajbhandari et al. 2020, sections 5.1, 5.2 and 7.)
"""

from collections.abc import Callable, Collection, Iterable, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from minidist.full.collectives import PreparedLater, reduce_scatter
from minidist.full.comm import Communicator
from minidist.full.comm.agree import same_call
from minidist.full.comm.stream import Handle, Stream
from minidist.full.ddp.backward import Hook
from minidist.full.ddp.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Bucket, FlatBucket
from minidist.full.ddp.flatten import flat_buffer, views_into
from minidist.full.ddp.reducer import Reducer
from minidist.full.ddp.strategy import DataParallel
from minidist.full.fsdp.access.linked import LinkedGradients
from minidist.full.fsdp.flat import Shard, moved, place_of
from minidist.full.optimizer.over_slices import SliceOptimizers
from minidist.full.placement import copies_of
from minidist.full.replica import Optimizer, Replica


class BucketShard:
    """The parameters of a bucket: views into one flat buffer, of which this rank updates a shard.

    Attributes
    ----------
    flat : Tensor
        All elements, on every rank, all the time.
    shard : Shard
        This rank's; its values are a part of `flat`.

    With `link`, new values are gathered on that, which has the ranks of `comm`.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        names: dict[nn.Parameter, str],
        comm: Communicator,
        link: Communicator | None = None,
    ) -> None:
        self.parameters, self.shard = parameters, Shard(parameters, names, comm)
        self.flat = flat_buffer(parameters, comm)
        self.views = views_into(self.flat, parameters)
        for parameter, view in zip(parameters, self.views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        # `data`, so that torch counts the changes of slices apart from those by a gathering
        self.shard.make_slices(self.flat.data[self.shard.start : self.shard.stop])
        self._gather = PreparedLater(
            "all_gather", self.shard.values, link or comm, out=self.flat, counts=self.shard.counts
        )

    def check_place(self) -> None:
        """Raise RuntimeError if a parameter has left the flat buffer, into which `publish`
        gathers.
        """
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if place_of(parameter) != place_of(view):
                raise RuntimeError(moved(self.shard.placements[parameter].name, view, parameter))

    def publish(self) -> None:
        """Gather every rank's updated values: one all-gather. Runs on the stream, if there is one."""
        self._gather()


class ZeRO1(DataParallel):
    """Sharded optimizer state. To read: `minidist.zero.ZeRO`.

    The gradients stay whole in their buckets, as in DDP, and are reduce-scattered.

    Build the optimizer with `optimizer`; clip its gradients with `clip_by_global_norm(model.slices,
    ...)`, or with torch's `clip_grad_norm_(model.parameters(), ...)`: once reduced,
    `parameter.grad` is that of this rank's slice.

    Parameters
    ----------
    model, comm, op, unused, bucket_bytes, first_bucket_bytes
        As for `DDP`.
    overlap : bool
        Return from the optimizer's step while parameters are still being gathered; each module
        waits for its own when it is called. This pays where communication has its own hardware.
        Call `wait` before you read parameters.

    An optimizer over the parameters themselves raises ValueError when it steps. If the model
    computes in 16 bits, use `MasterWeights` as the optimizer: it updates values in 32 bits.
    """

    stream: Stream[Communicator]
    kind_of_bucket: type[Bucket] = FlatBucket

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        op: str | None = None,
        unused: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        *,
        equal: bool = False,
        overlap: bool = False,
    ) -> None:
        super().__init__(model, comm, op, unused, equal=equal)
        self.stream, self.overlap = comm.stream(), overlap
        self.reducer = Reducer(
            self,
            self.kind_of_bucket,
            self.parameters_to_reduce,
            bucket_bytes,
            first_bucket_bytes,
        )
        self.shards: dict[Bucket, BucketShard] = {}
        for bucket in self.reducer.buckets:
            copies = copies_of(bucket.parameters[0], comm)
            part = BucketShard(bucket.parameters, self.names, copies, bucket.link)
            part.shard.gradient = torch.zeros_like(part.shard.values)
            self.shards[bucket] = part
        self._prepare_reductions()
        self.part_of = {
            parameter: self.shards[bucket] for parameter, bucket in self.reducer.bucket_of.items()
        }
        self.gathering: dict[BucketShard, Handle] = {}
        self.optimizers = SliceOptimizers(self, self.parameters_to_reduce)
        self.hooks += [
            self.optimizers.guard,
            LinkedGradients(self, self.parameters_to_reduce),
            model.register_forward_pre_hook(Hook(self.follow)),
            model.register_state_dict_pre_hook(Hook(self._refuse_old_values)),  # type: ignore[no-untyped-call]
        ]
        if overlap:
            for module in model.modules():
                self.hooks.append(module.register_forward_pre_hook(Hook(self._pre_forward)))

    # ------------- phase 1, during backward: reduce-scatter each bucket as soon as it is complete

    def _prepare_reductions(self) -> None:
        """Make a handle for each bucket. What they return lies in one room, the stream's, which
        the next one of the same dtype overwrites.
        """
        rooms: dict[torch.dtype, Tensor] = {}
        for part in self.shards.values():
            values = part.shard.values
            if len(values) > len(rooms.get(values.dtype, ())):
                rooms[values.dtype] = torch.empty_like(values)
        self.reductions = {
            bucket: PreparedLater(
                "reduce_scatter",
                bucket.flat,
                bucket.link,
                op=self.op,
                out=rooms[part.shard.values.dtype][: len(part.shard.values)],
            )
            for bucket, part in self.shards.items()
        }

    def launch(self, bucket: Bucket) -> Handle:
        """Begin to reduce a bucket; return what to wait for."""
        return self.stream.launch(self._reduce, bucket, bucket.take())

    def _reduce(self, bucket: Bucket, gradients: Tensor) -> None:
        """Reduce all ranks' gradients to this rank's shard of their sum. Runs on the stream."""
        self.shards[bucket].shard.add_gradient(self.reductions[bucket]())
        # the shard's gradient is the sum, and a next backward's come on top
        gradients.zero_()

    def reduced(self, used: Set[nn.Parameter]) -> None:
        """Let `parameter.grad` be the gradient of this rank's slice: all buckets are reduced."""
        super().reduced(used)
        for part in self.shards.values():
            part.shard.give_gradient(without=self.expected.nowhere_used)

    def begin_again(self) -> None:
        """Do nothing: what is reduced is in the shards, and the next comes on top."""

    def synchronize(self) -> None:
        """Reduce what `no_sync` has only added up, if no later backward has reduced it."""
        self.reducer.synchronize()

    # ------------- phase 2, the optimizer's step: each rank updates its slices, and no others

    def slice_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the elements of a parameter that this rank updates, flat."""
        return self.part_of[parameter].shard.slices[parameter]

    slices = Replica.trained
    """What this rank's optimizer updates: one slice for each trained parameter, in the model's
    order.
    """

    def optimizer(
        self,
        kind: Callable[..., Optimizer],
        groups: ParamsT | None = None,
        elementwise: bool = False,
        **options: Any,
    ) -> Optimizer:
        """Return an optimizer of this `kind` that holds state for this rank's slices only.

        See `SliceOptimizers.build`.
        """
        return self.optimizers.build(kind, groups, elementwise, options)

    def adopt(self, optimizer: torch.optim.Optimizer, elementwise: bool = False) -> None:
        """Change an optimizer over the model's parameters, in place, so that it updates this rank's
        slices; see `SliceOptimizers.adopt`.
        """
        self.optimizers.adopt(optimizer, elementwise)

    def check_places(self) -> None:
        """Raise RuntimeError if new values would not reach parameters, which lie elsewhere by
        now.
        """
        for part in self.shards.values():
            part.check_place()

    def passed_over(self, parameter: nn.Parameter) -> bool:
        """Tell whether this parameter has a gradient that its slice lacks."""
        given = self.reducer.bucket_of[parameter].unreduced(parameter)
        return given is not None and bool(given.any())

    # ------------- phase 3, after the step: all-gather the new parameters, bucket by bucket

    def stepped(self, updated: Collection[nn.Parameter] | None = None) -> None:
        """Gather the new parameters, bucket by bucket: first those that forward needs first.

        Each step of the optimizer ends with this. Collective.

        With `updated`, only the buckets of these parameters are gathered; one that two optimizers
        update, twice.
        """
        for bucket, part in reversed(self.shards.items()):
            if updated is None or any(parameter in updated for parameter in bucket.parameters):
                part.shard.published = part.shard.values._version
                self.gathering[part] = self.stream.launch(part.publish)
        if not self.overlap:
            self.wait()

    def follow(self, *_: object) -> None:
        """Publish slices that were changed since, but by no step: optimizers such as schedule-free
        ones exchange weights in `train()` and `eval()`.

        Each forward of the model begins with this. It is collective where some are newer: all ranks
        change their slices of the same parameters, empty ones, too.
        """
        newer = [at for at, part in enumerate(self.shards.values()) if part.shard.newer]
        if newer:
            same_call(self.comm, "publish", f"slices changed outside of step(), of buckets {newer}")
            buckets = [*self.shards]
            self.stepped({each for at in newer for each in buckets[at].parameters})

    def _refuse_old_values(self, *_: object) -> None:
        """Raise RuntimeError if parameters do not follow their slices: a rank may save alone."""
        if any(part.shard.newer for part in self.shards.values()):
            raise RuntimeError(
                "slices were changed outside of step(), and parameters have the old values of other "
                "ranks' slices, so this would save a mixture: call stepped() on all ranks first"
            )

    def unwrap(self) -> nn.Module:
        """Return the model without hooks, with the values that its slices have. Collective if some
        were changed outside of a step.
        """
        if self.hooks:
            self.follow()
            self.wait()
        return super().unwrap()

    def wait(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Wait until all parameters, or these, are gathered."""
        if parameters is None:
            parameters = self.part_of
        for parameter in parameters:
            part = self.part_of.get(parameter)  # None if it is frozen
            if part in self.gathering:
                self.gathering.pop(part).wait()

    def _pre_forward(self, module: nn.Module, _: object) -> None:
        self.wait(module.parameters(recurse=False))

    # ------------- then gradients are forgotten, and phase 1 begins anew

    def forget_gradients(self, parameters: Set[nn.Parameter], set_to_none: bool = True) -> None:
        """Forget the gradients of these parameters, and of their slices, or make them zeros."""
        super().forget_gradients(parameters, set_to_none)
        self.reducer.forget(parameters, set_to_none)
        for part in {self.part_of[parameter] for parameter in parameters}:
            part.shard.forget_gradients(parameters, set_to_none)

    # ------------- besides

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return what `parameter.grad` shows: this rank's slice of the reduced gradient, from when
        there is one.
        """
        own = self.reducer.bucket_of[parameter].unreduced(parameter)
        return self.slice_of(parameter).grad if own is None else own

    def held(self) -> dict[str, list[Tensor]]:
        """Return this rank's tensors by category, for `Account`: buckets and reduced shards are
        gradients.
        """
        gradients = [bucket.flat for bucket in self.shards]
        gradients += [part.shard.gradient for part in self.shards.values()]
        return {"gradients": [each for each in gradients if each is not None]}

    def _check_parameters(self) -> None:
        """Raise if nobody would reduce the gradient of a trained parameter, or one was
        converted.
        """
        super()._check_parameters()
        self.reducer.check_places()


class ZeRO2(ZeRO1):
    """Sharded gradients, too: a bucket's gradients are reduce-scattered as soon as they are
    complete, and freed.

    A bucket is launched when the one before has been reduced, so a rank holds the gradients of two
    buckets at most. Arguments are those of `ZeRO1`. In `no_sync` the gradients stay whole and add
    up.
    """

    whole_gradients = False
    kind_of_bucket = Bucket

    def _prepare_reductions(self) -> None:
        """Make no handle of a bucket, which lies in other memory at each backward."""

    def _reduce(self, bucket: Bucket, gradients: Tensor) -> None:
        """Reduce all ranks' gradients to this rank's shard of their sum. Runs on the stream.

        They are freed with the call.
        """
        self.shards[bucket].shard.add_gradient(reduce_scatter(gradients, bucket.link, self.op))

    def launch(self, bucket: Bucket) -> Handle:
        """Wait for the bucket before, then begin to reduce this one; return what to wait for."""
        if at := self.reducer.buckets.index(bucket):
            self.reducer.buckets[at - 1].wait()
        return super().launch(bucket)

"""DDP: the buckets of `plain.py`, each reduced while backward still computes the next one's gradients.

    backward   ...layer 4....layer 3....layer 2....layer 1...│ wait
    stream              └ bucket 0 ┘ └── bucket 1 ──┘ └ bucket 2 ┘

`Bucketed` decides the order of the buckets and when one is launched, for ZeRO 1 and 2, too; `DDP` all-reduces them.

It sends what `PlainDataParallel` sends, 2 (P - 1)/P n bytes a rank for n bytes of gradients, hidden behind computing.
Buckets are flat, in registered memory, and each gradient is a view into one: none is copied. (Li et al. 2020, 3.2.)
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Set
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from minidist.collectives import all_reduce
from minidist.comm import Communicator
from minidist.comm.stream import Stream
from minidist.parallel.data.backward import BackwardEnd, Hook, remove_all
from minidist.parallel.data.buckets import MIB, Bucket, FlatBucket, partition
from minidist.parallel.data.strategy import DataParallel


class Bucketed(DataParallel):
    """What DDP and ZeRO 1 and 2 share: a bucket is launched in the midst of backward, once its gradients are there.

    Parameters
    ----------
    model, comm, op, unused
        As for `DataParallel`.
    bucket_bytes, first_bucket_bytes : int
        A bucket is closed once it holds so many bytes. The first is small, so that the wire starts early.

    Buckets are filled in reverse order of the parameters: about the order in which backward finishes them. They are
    launched strictly in this order, so that all ranks reduce the same bucket at the same time, whatever finished first.
    """

    stream: Stream[Communicator]

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        op: str = "sum",
        unused: bool = False,
        bucket_bytes: int = 25 * MIB,
        first_bucket_bytes: int = MIB,
    ) -> None:
        super().__init__(model, comm, op, unused)
        parts = partition(self.parameters_to_reduce[::-1], bucket_bytes, first_bucket_bytes)
        self.buckets = [self._bucket(parameters) for parameters in parts]
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        self.stream = comm.stream()
        self.line: list[Bucket] = []  # what is still to be launched in this backward
        self.unreduced = False  # whether there are gradients that only `no_sync` has added up
        self.end = BackwardEnd(self._backward_ended, comm)
        self.accumulators = [get_gradient_edge(parameter).node for parameter in self.parameters_to_reduce]
        self.hooks: list[Any] = [node.register_prehook(Hook(self._gradient_comes)) for node in self.accumulators]
        for parameter in self.parameters_to_reduce:
            self.hooks.append(parameter.register_post_accumulate_grad_hook(Hook(self._gradient_arrived)))  # type: ignore[no-untyped-call]
        weakref.finalize(self, remove_all, self.hooks).atexit = False
        for parameter, bucket in self.bucket_of.items():
            bucket.forget(parameter, set_to_none=False)

    def _bucket(self, parameters: list[nn.Parameter]) -> Bucket:
        return FlatBucket(parameters, self.comm)

    @abstractmethod
    def _launch(self, bucket: Bucket) -> Any:
        """Begin to reduce a bucket; return what to wait for."""

    def unwrap(self) -> nn.Module:
        """Return the model without hooks, to be changed and wrapped again."""
        remove_all(self.hooks)
        return self.module

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients: autograd's next ones are copied into the buckets while they are still in the cache.

        Without `set_to_none` they are zeroed and added to, as in torch. That moves twice the bytes.
        """
        self.forget_gradients(set(self.parameters_to_reduce), set_to_none)

    def forget_gradients(self, parameters: Set[nn.Parameter], set_to_none: bool = True) -> None:
        """Forget the gradients of these parameters, or make them zeros."""
        for parameter in parameters:
            self.bucket_of[parameter].forget(parameter, set_to_none)
        if len(parameters) == len(self.parameters_to_reduce):
            self.unreduced = False

    def synchronize(self) -> None:
        """Reduce what was only added up in `no_sync`, if no backward outside of it has done so."""
        if self.unreduced:
            self._backward_begins()
            self._backward_ended()

    def held(self) -> dict[str, list[Tensor]]:
        """Return the tensors of this rank, by category of the account: the buckets, whatever lies in them now."""
        return {"gradients": [bucket.flat for bucket in self.buckets if bucket.flat is not None]}

    def _gradient_comes(self, *_: object) -> None:
        """Autograd is about to add to some `parameter.grad`."""
        if self.synchronising and self.end.expect():
            self._backward_begins()

    def _gradient_arrived(self, parameter: Tensor) -> None:
        """Autograd has added to `parameter.grad`; runs in the midst of backward."""
        assert isinstance(parameter, nn.Parameter)
        bucket = self.bucket_of[parameter]
        self._check_arrival(parameter, bucket.arrived)
        bucket.adopt(parameter)
        bucket.used.add(parameter)
        self.unreduced = not self.synchronising
        if self.synchronising:
            bucket.arrived.add(parameter)
            self._launch_ready()

    def _backward_begins(self) -> None:
        self.line = [*self.buckets]
        for bucket in self.buckets:
            bucket.state = "filling"
            bucket.arrived.clear()

    def _launch_ready(self, all_of_them: bool = False) -> None:
        """Launch the complete buckets at the head of the line."""
        while self.line and (all_of_them or len(self.line[0].arrived) == len(self.line[0].parameters)):
            bucket = self.line.pop(0)
            bucket.state = "launched"
            bucket.handle = self._launch(bucket)

    def _backward_ended(self) -> None:
        """Launch what is left (buckets with unused parameters), and wait for all."""
        self.unreduced = False
        used = {parameter for parameter, bucket in self.bucket_of.items() if bucket.has_gradient(parameter)}
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                if parameter not in bucket.arrived:
                    bucket.adopt(parameter)
        self._launch_ready(all_of_them=True)
        for bucket in self.buckets:
            bucket.wait()
        self._drop_unused(used)


class DDP(Bucketed):
    """Every rank has all gradients: a bucket is all-reduced where it lies. Arguments are those of `Bucketed`.

    Of gradients that were not zeroed since they were summed, rank 0's count: a second backward adds to the first, as in
    a serial run. `torch.autograd.grad` runs no hooks, and so returns this rank's own gradients.
    """

    summed = False  # whether the gradients are those of all ranks

    def _launch(self, bucket: Bucket) -> Any:
        return self.stream.launch(all_reduce, bucket.take(), self.stream.comm, self.op)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients; see `Bucketed`."""
        self.summed = False
        super().zero_grad(set_to_none)

    def _gradient_comes(self, *_: object) -> None:
        """Have what is summed already, and the same on every rank, enter the next sum once."""
        if self.summed:
            self.summed = False
            if self.op == "sum" and self.comm.rank > 0:
                for parameter in self.parameters_to_reduce:
                    if parameter.grad is not None:
                        parameter.grad.zero_()
        super()._gradient_comes()

    def _backward_ended(self) -> None:
        self.summed = True
        super()._backward_ended()

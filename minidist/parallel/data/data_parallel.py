"""DDP: `plain.py` with overlap. A bucket is reduced while backward still computes the gradients of
the next.

    backward   ...layer 4....layer 3....layer 2....layer 1...│ wait
    stream              └ bucket 0 ┘ └── bucket 1 ──┘ └ bucket 2 ┘

    plain.py                  here
    partition                 `Bucketed.__init__`; buckets are flat tensors in registered memory (`FlatBucket`)
    take_gradients            `_gradient_arrived`: from then on the gradient is a view into its bucket
    all_reduce                `_launch_ready`, which calls `DDP._launch`: on a stream, beside backward
    after backward            `_backward_ended`: launches what is left, and waits for all

`Bucketed` is shared with ZeRO 1 and 2: it decides which bucket is launched next, and when. The
bytes are those of `PlainDataParallel`: each rank sends 2 (P - 1)/P n bytes for n bytes of
gradients. (Li et al. 2020, section 3.2.)
"""

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
from minidist.parallel.placement import copies_of


class Bucketed(DataParallel):
    """What DDP and ZeRO 1 and 2 share: a bucket is launched during backward, as soon as all its
    gradients are there.

    Parameters
    ----------
    model, comm, op, unused
        As for `DataParallel`.
    bucket_bytes, first_bucket_bytes : int
        A bucket is closed once it holds this many bytes. The first bucket is small, so that sending
        starts early.

    Buckets take the parameters in reverse order, because backward finishes them in about that
    order. They are launched strictly in this order, whichever is complete first: so all ranks
    reduce the same bucket at the same time.
    """

    stream: Stream[Communicator]

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        op: str | None = None,
        unused: bool = False,
        bucket_bytes: int = 25 * MIB,
        first_bucket_bytes: int = MIB,
    ) -> None:
        super().__init__(model, comm, op, unused)
        self.stream = comm.stream()
        groups = dict.fromkeys(
            copies for p in self.parameters_to_reduce if (copies := copies_of(p, comm)) is not comm
        )
        # for the stream's thread
        self.links = {comm: self.stream.comm} | {copies: copies.fork() for copies in groups}
        parts = partition(self.in_buckets()[::-1], bucket_bytes, first_bucket_bytes)
        self.buckets = [
            self._bucket(parameters, copies_of(parameters[0], comm)) for parameters in parts
        ]
        self.bucket_of = {
            parameter: bucket for bucket in self.buckets for parameter in bucket.parameters
        }
        self.line: list[Bucket] = []  # what is still to be launched in this backward
        self.unreduced: set[nn.Parameter] = set()  # whose gradients only `no_sync` has added up
        self.end = BackwardEnd(self._backward_ended, comm)
        self.accumulators = [get_gradient_edge(parameter).node for parameter in self.bucket_of]
        self.hooks: list[Any] = [
            node.register_prehook(Hook(self._gradient_comes)) for node in self.accumulators
        ]
        for parameter in self.bucket_of:
            self.hooks.append(
                parameter.register_post_accumulate_grad_hook(Hook(self._gradient_arrived))  # type: ignore[no-untyped-call]
            )
        weakref.finalize(self, remove_all, self.hooks).atexit = False
        for parameter, bucket in self.bucket_of.items():
            parameter._grad = None
            bucket.adopt(parameter)
        # the zeros put there
        self.zeroed = {parameter: parameter._grad for parameter in self.parameters_to_reduce}

    def in_buckets(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients go through buckets."""
        return self.parameters_to_reduce

    def _bucket(self, parameters: list[nn.Parameter], copies: Communicator) -> Bucket:
        return FlatBucket(parameters, copies, self.links[copies])

    @abstractmethod
    def _launch(self, bucket: Bucket) -> Any:
        """Begin to reduce a bucket; return what to wait for."""

    def unwrap(self) -> nn.Module:
        """Return the model without hooks, to be changed and wrapped again."""
        remove_all(self.hooks)
        return self.module

    def forget_gradients(self, parameters: Set[nn.Parameter], set_to_none: bool = True) -> None:
        """Forget the gradients of these parameters, or make them zeros; see `DataParallel`."""
        super().forget_gradients(parameters, set_to_none)
        self.zeroed |= {parameter: parameter._grad for parameter in parameters}
        self.unreduced -= parameters
        for bucket in self.buckets:
            bucket.taken -= parameters

    def synchronize(self) -> None:
        """Reduce what `no_sync` has only added up, if no later backward has reduced it."""
        if self.unreduced:
            self._backward_begins()
            self._backward_ended()

    def held(self) -> dict[str, list[Tensor]]:
        """Return this rank's tensors by category, for `Account`: the buckets are gradients."""
        return {"gradients": [bucket.flat for bucket in self.buckets if bucket.flat is not None]}

    def _check_parameters(self) -> None:
        """Raise if nobody would reduce the gradient of a trained parameter, or one was
        converted.
        """
        super()._check_parameters()
        for parameter, bucket in self.bucket_of.items():
            bucket.check_place(parameter)

    def _gradient_comes(self, *_: object) -> None:
        """Autograd is about to add to some `parameter.grad`."""
        if self.synchronising and self.end.expect():
            self._backward_begins()

    def _gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Autograd has added to `parameter.grad`. This runs during backward."""
        bucket = self.bucket_of[parameter]
        self._check_arrival(parameter, bucket.arrived)
        bucket.adopt(parameter)
        self.zeroed.pop(parameter, None)
        if self.synchronising:
            bucket.arrived.add(parameter)
            self._launch_ready()
        else:
            self.unreduced.add(parameter)

    def _backward_begins(self) -> None:
        self.line = [*self.buckets]
        for bucket in self.buckets:
            bucket.arrived.clear()

    def _launch_ready(self, all_of_them: bool = False) -> None:
        """Launch the complete buckets at the head of the line."""
        while self.line and (
            all_of_them or len(self.line[0].arrived) == len(self.line[0].parameters)
        ):
            bucket = self.line.pop(0)
            bucket.handle = self._launch(bucket)

    def _backward_ended(self) -> None:
        """Launch the buckets that are left, which have unused parameters, and wait for all
        buckets.
        """
        self.unreduced.clear()
        given = [
            parameter for parameter in self.parameters_to_reduce if parameter._grad is not None
        ]
        used = {
            parameter for parameter in given if parameter._grad is not self.zeroed.get(parameter)
        }
        used.update(*(bucket.taken for bucket in self.buckets))
        for parameter, bucket in self.bucket_of.items():
            if parameter not in bucket.arrived:
                bucket.adopt(parameter)
        self._launch_ready(all_of_them=True)
        for bucket in self.buckets:
            bucket.wait()
        self._drop_unused(used)


class DDP(Bucketed):
    """All-reduce each bucket in place, so that every rank has all gradients. Arguments are those of
    `Bucketed`.

    A second backward adds to the first, as in a serial run: of gradients that are sums already,
    only rank 0's enter the next sum (of experts, those of the first copy). `torch.autograd.grad`
    runs no hooks, so it returns this rank's own gradients.
    """

    summed = False  # whether the gradients are those of all ranks

    def in_buckets(self) -> list[nn.Parameter]:
        """Return all parameters but experts that no other rank has: their gradients are whole as
        they come.
        """
        return [
            p
            for p in self.parameters_to_reduce
            if copies_of(p, self.comm).size > 1 or self.comm.size == 1
        ]

    def _launch(self, bucket: Bucket) -> Any:
        return self.stream.launch(all_reduce, bucket.take(), bucket.link, self.op)

    def _gradient_comes(self, *_: object) -> None:
        """Let gradients that are summed already, and the same on every rank, enter the next sum
        only once.
        """
        if self.summed:
            self.summed = False
            for parameter in self.parameters_to_reduce if self.op == "sum" else ():
                if parameter.grad is not None and copies_of(parameter, self.comm).rank > 0:
                    parameter.grad.zero_()
        super()._gradient_comes()

    def _backward_ended(self) -> None:
        self.summed = True
        super()._backward_ended()

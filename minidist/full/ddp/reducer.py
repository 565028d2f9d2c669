"""The reducer: which bucket is launched next, and when. DDP and ZeRO 1 and 2 have one.

    gradients come     4.weight │ 2.weight │ 3.weight │ 1.weight        in any order, on each rank
    to launch          bucket 0, bucket 1, bucket 2                     in one order, on all ranks

Buckets take the parameters in reverse order, because backward finishes them in about that order.
They are launched strictly in this order, whichever is complete first: so all ranks reduce the same
bucket at the same time.
"""

import weakref
from collections.abc import Set
from typing import Any, Protocol

from torch import nn
from torch.autograd.graph import get_gradient_edge

from minidist.full.comm import Communicator
from minidist.full.comm.stream import Handle, Stream
from minidist.full.ddp.backward import BackwardEnd, Hook, remove_all
from minidist.full.ddp.buckets import Bucket, links_of, partition
from minidist.full.ddp.strategy import ExpectedGradients
from minidist.full.placement import copies_of


class Strategy(Protocol):
    """Who has a reducer. It keeps the reducer alive, and not the other way round."""

    comm: Communicator
    stream: Stream[Communicator]
    expected: ExpectedGradients
    hooks: list[Any]

    def launch(self, bucket: Bucket) -> Handle:
        """Begin to reduce a bucket; return what to wait for."""

    def begin_again(self) -> None:
        """Prepare gradients that were reduced for more, which are about to be added to them."""

    def reduced(self, used: Set[nn.Parameter]) -> None:
        """Go on: all gradients of a backward are reduced, and these parameters were used."""


class Reducer:
    """The buckets of a model, on their way through each backward. Building it is collective.

    Parameters
    ----------
    strategy : Strategy
    kind : type[Bucket]
        Where gradients lie while they wait.
    parameters : list[nn.Parameter]
        Those that go into buckets.
    bucket_bytes, first_bucket_bytes : int
        As for `DDP`.

    Attributes
    ----------
    buckets : list[Bucket]
        In the order in which they are launched.
    to_launch : list[Bucket]
        Those of this backward that are not launched yet.
    unreduced : set[nn.Parameter]
        Those whose gradients only `no_sync` has added up.
    fresh : set[nn.Parameter]
        Those whose gradients were reduced since an optimizer updated them, so that what has been
        put in their place since may have been made of them.
    """

    def __init__(
        self,
        strategy: Strategy,
        kind: type[Bucket],
        parameters: list[nn.Parameter],
        bucket_bytes: int,
        first_bucket_bytes: int,
    ) -> None:
        self.strategy, self.expected = weakref.ref(strategy), strategy.expected
        links = links_of(self.expected.parameters, strategy.comm, strategy.stream)
        self.buckets: list[Bucket] = []
        for several in partition(parameters[::-1], bucket_bytes, first_bucket_bytes):
            copies = copies_of(several[0], strategy.comm)
            self.buckets.append(kind(several, copies, links[copies]))
        self.bucket_of = {
            parameter: bucket for bucket in self.buckets for parameter in bucket.parameters
        }
        self.to_launch: list[Bucket] = []
        self.unreduced: set[nn.Parameter] = set()
        self.fresh: set[nn.Parameter] = set()
        self.ended = False  # whether a backward has ended since one began last
        self.end = BackwardEnd(self._backward_ended, strategy.comm)
        self.accumulators = [get_gradient_edge(parameter).node for parameter in self.bucket_of]
        hooks = strategy.hooks
        for node in self.accumulators:
            hooks.append(node.register_prehook(Hook(self._gradient_comes)))
        for parameter in self.bucket_of:
            arrived = Hook(self._gradient_arrived, whose=self.expected.strategy)
            hooks.append(parameter.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]
            parameter._grad = None
        weakref.finalize(self, remove_all, hooks).atexit = False

    # ---------------------------------------------------------------- in the order of a backward

    def _gradient_comes(self, *_: object) -> None:
        """Autograd is about to add to some `parameter.grad`."""
        if self.ended:
            self.ended = False
            self._owner().begin_again()
        if self.expected.synchronising and self.end.expect(self.strategy()):
            self._begin()

    def _begin(self) -> None:
        self.to_launch = [*self.buckets]
        for bucket in self.buckets:
            bucket.refill()

    def _gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Autograd has added to `parameter.grad`. This runs during backward."""
        bucket = self.bucket_of[parameter]
        if self.expected.synchronising and not self.end.expected:  # `_gradient_comes` was lost
            raise RuntimeError(bucket.moved_away(parameter))
        self.expected.check_arrival(parameter, bucket.ready)
        bucket.adopt(parameter)
        if self.expected.synchronising:
            bucket.mark_ready(parameter)
            self.launch_ready()
        else:
            self.unreduced.add(parameter)

    def launch_ready(self, all_of_them: bool = False) -> None:
        """Launch the complete buckets at the head of the queue."""
        while self.to_launch and (all_of_them or self.to_launch[0].complete):
            self.to_launch.pop(0).launch(self._owner().launch)

    def _backward_ended(self) -> None:
        """Launch the buckets that are left, which have unused parameters, and wait for all."""
        self.ended = True
        self.unreduced.clear()
        used = {parameter for parameter in self.expected.parameters if parameter._grad is not None}
        used.update(*(bucket.taken for bucket in self.buckets))
        for parameter, bucket in self.bucket_of.items():
            if parameter not in bucket.ready:
                bucket.adopt(parameter)
        self.launch_ready(all_of_them=True)
        for bucket in self.buckets:
            bucket.wait()
        for parameter in self.bucket_of:
            if parameter._grad is not None:
                parameter._grad.summed = True  # type: ignore[attr-defined]
        self.fresh.update(self.bucket_of)
        self._owner().reduced(used)

    def _owner(self) -> Strategy:
        strategy = self.strategy()
        assert strategy is not None, "hooks live no longer than the strategy"
        return strategy

    # ---------------------------------------------------------------- besides

    def synchronize(self) -> None:
        """Reduce what `no_sync` has only added up, if no later backward has reduced it."""
        if self.unreduced:
            self._begin()
            self._backward_ended()

    def forget(self, parameters: Set[nn.Parameter], set_to_none: bool) -> None:
        """Note that these gradients were forgotten, or have become zeros, which an optimizer still
        takes for gradients.
        """
        self.unreduced -= parameters
        if set_to_none:
            for bucket in self.buckets:
                bucket.taken -= parameters

    def only_own(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter, which is about to be updated, has a gradient of this rank
        alone.
        """
        gradient = parameter._grad
        reduced = parameter in self.fresh or hasattr(gradient, "summed")
        self.fresh.discard(parameter)
        return gradient is not None and (not reduced or parameter in self.unreduced)

    def check_places(self) -> None:
        """Raise RuntimeError if a parameter was moved or converted."""
        for parameter, bucket in self.bucket_of.items():
            bucket.check_place(parameter)

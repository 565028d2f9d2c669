"""DDP: the buckets of `plain.py`, each reduced while backward still computes the next one's gradients.

    backward   ...layer 4....layer 3....layer 2....layer 1...│ wait
    stream              └ bucket 0 ┘ └── bucket 1 ──┘ └ bucket 2 ┘

It sends what `PlainDataParallel` sends, 2 (P - 1)/P n bytes a rank for n bytes of gradients, hidden behind computing.
Buckets are flat, in registered memory, and each gradient is a view into one: none is copied. (Li et al. 2020, 3.2.)
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from minidist.collectives import all_reduce
from minidist.comm import Communicator
from minidist.parallel.data.backward import BackwardEnd, Hook, hooked_by, kept_by_graph, remove_all
from minidist.parallel.data.buckets import Bucket, FlatBucket, partition
from minidist.parallel.data.replicas import copy_from_root, make_equal

MIB = 1 << 20


class DataParallel(nn.Module):
    """What all variants share, plain or not: equal ranks at the start, buffers kept equal, `no_sync`.

    Parameters
    ----------
    model : nn.Module
        The serial model. Its parameters and buffers are overwritten by rank 0's.
    comm : Communicator
        The ranks of the data axis.
    op : {"sum", "mean"}
        What becomes of the ranks' gradients.
    unused : bool
        Allow parameters that get no gradient. What no rank used then keeps `grad = None`, as in a serial run; to know
        that costs an all-reduce of one byte a parameter. Without it such a parameter is an error.

    Raises
    ------
    MismatchError
        On every rank, if the ranks' models differ in a name, shape or dtype, or in what is frozen.
    """

    ignored: Collection[nn.Parameter] = ()  # left as they are, as far as a strategy offers that

    def __init__(self, model: nn.Module, comm: Communicator, op: str = "sum", unused: bool = False) -> None:
        super().__init__()
        if op not in ("sum", "mean"):
            raise ValueError(f"op={op!r}: gradients are reduced by 'sum' or 'mean'")
        self.module, self.comm, self.op, self.unused, self.synchronising = model, comm, op, unused, True
        self._find_parameters()
        self._check_unwrapped()
        self.nowhere_used: set[nn.Parameter] = set()  # in the last step, by any rank
        make_equal(model, comm, self.ignored)

    def _find_parameters(self) -> None:
        self.names = {parameter: name for name, parameter in self.module.named_parameters()}
        self.parameters_to_reduce = [parameter for parameter in self.names if parameter.requires_grad]

    def _check_unwrapped(self) -> None:
        for parameter, name in self.names.items():
            if parameter.untyped_storage().nbytes() < parameter.nbytes:
                raise ValueError(f"{name} has no memory of its own, as if sharded already: wrap the model once")
            if hooked_by(DDP, parameter):
                raise ValueError(
                    f"parameter {name} belongs to another DDP already, and two would sum its gradient twice: call "
                    "unwrap() on the other first"
                )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. In training its buffers first become rank 0's, as running averages drift apart.

        Raises
        ------
        RuntimeError
            In training, if a parameter was added or unfrozen since: nobody would reduce its gradient.
        """
        if self.training:
            self._check_parameters()
            if self.synchronising:
                for buffer in self.module.buffers():
                    copy_from_root(buffer, self.comm)
        return kept_by_graph(self, self.module(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        """Refuse to be copied or pickled: the ranks cannot be."""
        raise TypeError(f"{type(self).__name__} belongs to running ranks: copy or save its .module instead")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up gradients locally in this context: for all microbatches of a step but the last."""
        before, self.synchronising = self.synchronising, False
        try:
            yield
        finally:
            self.synchronising = before

    def synchronize(self) -> None:
        """Make the gradients equal on all ranks; call it once after the last backward of a step."""
        raise TypeError(f"{type(self).__name__} does not say how it synchronises: use one of its subclasses")

    def _check_parameters(self) -> None:
        """Raise if the model got a parameter to train that nobody would reduce."""
        known = {*self.parameters_to_reduce, *self.ignored}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and parameter not in known:
                raise RuntimeError(
                    f"parameter {name} was added, replaced or unfrozen after the model was wrapped, so its gradients "
                    "would stay different on every rank: change the model first, then wrap it"
                )

    def _refuse_graphs(self) -> None:
        if torch.is_grad_enabled():
            name = type(self).__name__
            raise RuntimeError(f"{name} reduces numbers, not graphs: call backward() without create_graph=True")

    def _check_arrival(self, parameter: nn.Parameter, arrived: Collection[nn.Parameter]) -> None:
        """Raise if a gradient that has come is to be differentiated again, or came before in this backward."""
        self._refuse_graphs()
        if self.synchronising and parameter in arrived:
            raise RuntimeError(
                f"a second gradient came for {self.names[parameter]} within one backward, which may be reduced by now: "
                "a parameter shared between checkpointed layers needs checkpoint(use_reentrant=False)"
            )

    def _drop_unused(self, used: list[bool]) -> None:
        """Set `grad = None` for parameters that no rank used, or complain about those that this one did not."""
        if not self.unused or not used:
            missing = [self.names[p] for p, was in zip(self.parameters_to_reduce, used, strict=True) if not was]
            if missing:
                raise RuntimeError(
                    f"rank {self.comm.rank}: no gradient came for {', '.join(missing[:3])}"
                    f"{' and others' if len(missing) > 3 else ''}: if the model is meant to leave parameters out, pass "
                    "unused=True; if not, freeze them with requires_grad_(False)"
                )
            return
        device = self.parameters_to_reduce[0].device
        flags = torch.tensor(used, dtype=torch.uint8, device="cpu" if device.type == "meta" else device)
        all_reduce(flags, self.comm, op="max")
        self.nowhere_used = {p for p, flag in zip(self.parameters_to_reduce, flags.tolist(), strict=True) if not flag}
        for parameter in self.nowhere_used:
            parameter.grad = None


class DDP(DataParallel):
    """`PlainDataParallel` with hooks: a bucket is launched in the midst of backward, once its gradients are there.

    Parameters
    ----------
    model, comm, op, unused
        As for `DataParallel`.
    bucket_bytes, first_bucket_bytes : int
        A bucket is closed once it holds so many bytes. The first is small, so that the wire starts early.

    Buckets are filled in reverse order of the parameters: about the order in which backward finishes them. They are
    launched strictly in this order, so that all ranks reduce the same bucket at the same time, whatever finished first.
    Of gradients that were not zeroed since they were summed, rank 0's count: a second backward adds to the first, as in
    a serial run. `torch.autograd.grad` runs no hooks, and so returns this rank's own gradients.
    """

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
        self.next_to_launch = 0
        self.unreduced = False
        self.end = BackwardEnd(self._backward_ended, comm)
        self.accumulators = [get_gradient_edge(parameter).node for parameter in self.parameters_to_reduce]
        self.hooks: list[Any] = [node.register_prehook(Hook(self._gradient_comes)) for node in self.accumulators]
        for parameter in self.parameters_to_reduce:
            self.hooks.append(parameter.register_post_accumulate_grad_hook(Hook(self._gradient_arrived)))  # type: ignore[no-untyped-call]
        weakref.finalize(self, remove_all, self.hooks).atexit = False
        DDP.zero_grad(self, set_to_none=False)

    def _bucket(self, parameters: list[nn.Parameter]) -> Bucket:
        return FlatBucket(parameters, self.comm)

    def _launch(self, bucket: Bucket) -> Any:
        assert isinstance(bucket, FlatBucket)
        return self.stream.launch(all_reduce, bucket.flat, self.stream.comm, self.op)

    def unwrap(self) -> nn.Module:
        """Return the model without hooks, to be changed and wrapped again."""
        remove_all(self.hooks)
        return self.module

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients: autograd's next ones are copied into the buckets while they are still in the cache.

        Without `set_to_none` they are zeroed and added to, as in torch. That moves twice the bytes.
        """
        self.summed = self.unreduced = False
        for bucket in self.buckets:
            bucket.zero(set_to_none)

    def synchronize(self) -> None:
        """Reduce what was only added up in `no_sync`, if no backward outside of it has done so."""
        if self.unreduced:
            self._backward_begins()
            self._backward_ended()

    def held(self) -> dict[str, list[Tensor]]:
        """Return the tensors of this rank, by category of the account: the buckets, whatever lies in them now."""
        return {"gradients": [bucket.flat for bucket in self.buckets if isinstance(bucket, FlatBucket)]}

    def _gradient_comes(self, *_: object) -> None:
        """Autograd is about to add to some `parameter.grad`."""
        if self.summed:  # what the gradients hold already is the same on every rank, and must be summed once
            self.summed = False
            if self.op == "sum" and self.comm.rank > 0:
                for parameter in self.parameters_to_reduce:
                    if parameter.grad is not None:
                        parameter.grad.zero_()
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
        self.next_to_launch = 0
        for bucket in self.buckets:
            bucket.state = "filling"
            bucket.arrived.clear()

    def _launch_ready(self, all_of_them: bool = False) -> None:
        """Launch the complete buckets at the head of the line."""
        while self.next_to_launch < len(self.buckets):
            bucket = self.buckets[self.next_to_launch]
            if len(bucket.arrived) < len(bucket.parameters) and not all_of_them:
                return
            bucket.state = "launched"
            bucket.handle = self._launch(bucket)
            self.next_to_launch += 1

    def _backward_ended(self) -> None:
        """Launch what is left (buckets with unused parameters), and wait for all."""
        self.summed, self.unreduced = True, False
        used = [self.bucket_of[parameter].has_gradient(parameter) for parameter in self.parameters_to_reduce]
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                if parameter not in bucket.arrived:
                    bucket.adopt(parameter)
        self._launch_ready(all_of_them=True)
        for bucket in self.buckets:
            bucket.handle.wait()
            bucket.state = "done"
        self._drop_unused(used)

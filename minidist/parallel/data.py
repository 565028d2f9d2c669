"""Data parallelism: every rank a full model and a part of the batch; after backward, the same gradients everywhere.

    variant             when it communicates                               messages for M parameters, B buckets
    ParameterServer     after backward; rank 0 adds up and answers         P - 1 in and out of one rank, M times
    NaiveDataParallel   after backward; one all-reduce a parameter         M all-reduces
    DDP                 during backward; one all-reduce a bucket           B all-reduces, hidden behind computing

    backward   ...layer 4....layer 3....layer 2....layer 1...│ wait
    stream              └ bucket 0 ┘ └── bucket 1 ──┘ └ bucket 2 ┘

For n bytes of gradients a rank sends 2 (P - 1)/P n bytes; with a server it sends n, and the server (P - 1) n. DDP's
buckets are flat and lie in registered memory, and each gradient is a view into one: nothing is copied to be sent.
(Li et al. 2020, section 3.2.)

Gradients are *summed* by default: a loss divided by the global number of tokens then gives the serial gradient exactly.
`op="mean"` is torch's convention, for loops that divide by the local number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minidist.collectives import all_reduce, broadcast
from minidist.comm import Communicator, MismatchError

MIB = 1 << 20


class DataParallel(nn.Module):
    """What the variants share: equal ranks at the start, buffers kept equal, `no_sync`.

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
        On every rank, if the ranks' models differ in a name, shape or dtype.
    """

    def __init__(self, model: nn.Module, comm: Communicator, op: str = "sum", unused: bool = False) -> None:
        super().__init__()
        if op not in ("sum", "mean"):
            raise ValueError(f"op={op!r}: gradients are reduced by 'sum' or 'mean'")
        self.module, self.comm, self.op, self.unused = model, comm, op, unused
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.parameters_to_reduce = [parameter for parameter in self.names if parameter.requires_grad]
        self.synchronising = True
        _check_same_model(model, comm)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                broadcast(tensor.data, comm)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. In training its buffers first become rank 0's, as running averages drift apart."""
        if self.training and self.synchronising:
            for buffer in self.module.buffers():
                broadcast(buffer, self.comm)
        return self.module(*args, **kwargs)

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

    def _drop_unused(self, used: list[bool]) -> None:
        """Set `grad = None` for parameters that no rank used, or complain about those that this one did not."""
        if not self.unused:
            missing = [self.names[p] for p, was in zip(self.parameters_to_reduce, used, strict=True) if not was]
            if missing:
                raise RuntimeError(
                    f"rank {self.comm.rank}: no gradient came for {', '.join(missing[:3])}"
                    f"{' and others' if len(missing) > 3 else ''}: if the model is meant to leave parameters out, pass "
                    "unused=True; if not, freeze them with requires_grad_(False)"
                )
            return
        flags = torch.tensor(used, dtype=torch.uint8, device=self.parameters_to_reduce[0].device)
        all_reduce(flags, self.comm, op="max")
        for parameter, flag in zip(self.parameters_to_reduce, flags.tolist(), strict=True):
            if not flag:
                parameter.grad = None


class NaiveDataParallel(DataParallel):
    """One all-reduce per parameter, after backward. Nothing overlaps, and small parameters cost a latency each."""

    algorithm = "auto"

    def synchronize(self) -> None:
        """Reduce every gradient in place."""
        used = [parameter.grad is not None for parameter in self.parameters_to_reduce]
        for parameter in self.parameters_to_reduce:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            all_reduce(parameter.grad, self.comm, self.op, self.algorithm)
        self._drop_unused(used)


class ParameterServer(NaiveDataParallel):
    """Rank 0 collects every gradient and answers with the sum.

    A server that also updates would answer with the new parameter: as many bytes. Answering with the sum lets every
    rank keep an optimizer of its own, so the three variants can be compared in one training loop.
    """

    algorithm = "central"


class Bucket:
    """A flat buffer of gradients, reduced in one piece. It is `filling`, `launched`, or `done`."""

    def __init__(self, parameters: list[nn.Parameter], comm: Communicator) -> None:
        self.parameters = parameters
        size, like = sum(parameter.numel() for parameter in parameters), parameters[0]
        registered = comm.allocate(size, like.dtype) if like.device.type != "meta" else like.new_empty(size)
        self.flat: Tensor = registered.to(like.device)  # type: ignore[union-attr]
        self.views = dict(zip(parameters, self._views(), strict=True))
        self.state = "filling"
        self.arrived: set[nn.Parameter] = set()  # in this backward
        self.used: set[nn.Parameter] = set()  # since the gradients were zeroed
        self.handle: Any = None

    def _views(self) -> list[Tensor]:
        pieces = torch.split(self.flat, [parameter.numel() for parameter in self.parameters])
        return [piece.view_as(parameter) for piece, parameter in zip(pieces, self.parameters, strict=True)]

    def adopt(self, parameter: nn.Parameter) -> None:
        """Have the parameter's gradient live in the bucket, wherever autograd put it."""
        view = self.views[parameter]
        if parameter.grad is not view:
            if parameter.grad is not None:
                view.copy_(parameter.grad)
            parameter.grad = view


class DDP(DataParallel):
    """Buckets reduced while backward still runs (Li et al. 2020).

    Parameters
    ----------
    model, comm, op, unused
        As for `DataParallel`.
    bucket_bytes, first_bucket_bytes : int
        A bucket is closed once it holds so many bytes. The first is small, so that the wire starts early.

    Buckets are filled in reverse order of the parameters: about the order in which backward finishes them. They are
    launched strictly in this order, so that all ranks reduce the same bucket at the same time, whatever finished first.
    Zero the gradients between two synchronised backward passes: what is already summed would be summed again.
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
        self.buckets = [Bucket(parameters, comm) for parameters in parts]
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        self.stream = comm.stream()
        self.next_to_launch = 0
        self.backward_runs = False
        for parameter in self.parameters_to_reduce:
            parameter.register_post_accumulate_grad_hook(self._gradient_arrived)  # type: ignore[no-untyped-call]
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero all gradients, one call a bucket. With `set_to_none` autograd's next ones are copied into the bucket."""
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.used.clear()
            for parameter, view in bucket.views.items():
                parameter.grad = None if set_to_none else view

    def synchronize(self) -> None:
        """Nothing is left to do: `backward()` returns with all gradients reduced."""

    def _gradient_arrived(self, parameter: Tensor) -> None:
        """Autograd has added to `parameter.grad`; runs in the midst of backward."""
        assert isinstance(parameter, nn.Parameter)
        bucket = self.bucket_of[parameter]
        if self.synchronising and not self.backward_runs:
            self._backward_begins()
        if self.synchronising and bucket.state != "filling":
            raise RuntimeError(
                f"a second gradient came for {self.names[parameter]} after its bucket was {bucket.state}: use the "
                "model once per backward, or wrap all backward passes of a step but the last in no_sync()"
            )
        bucket.adopt(parameter)
        bucket.used.add(parameter)
        if self.synchronising:
            bucket.arrived.add(parameter)
            self._launch_ready()

    def _backward_begins(self) -> None:
        self.backward_runs, self.next_to_launch = True, 0
        for bucket in self.buckets:
            bucket.state = "filling"
            bucket.arrived.clear()
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _launch_ready(self, all_of_them: bool = False) -> None:
        """Launch the complete buckets at the head of the line."""
        while self.next_to_launch < len(self.buckets):
            bucket = self.buckets[self.next_to_launch]
            if len(bucket.arrived) < len(bucket.parameters) and not all_of_them:
                return
            bucket.state = "launched"
            bucket.handle = self.stream.launch(all_reduce, bucket.flat, self.stream.comm, self.op)
            self.next_to_launch += 1

    def _backward_ended(self) -> None:
        """Launch what is left (buckets with unused parameters), and wait for all."""
        self.backward_runs = False
        used = [parameter in self.bucket_of[parameter].used for parameter in self.parameters_to_reduce]
        for parameter in self.parameters_to_reduce:
            if parameter.grad is None:  # it contributes nothing, not what an earlier step left in the bucket
                parameter.grad = self.bucket_of[parameter].views[parameter].zero_()
        self._launch_ready(all_of_them=True)
        for bucket in self.buckets:
            bucket.handle.wait()
            bucket.state = "done"
        self._drop_unused(used)


def partition(parameters: list[nn.Parameter], bucket_bytes: int, first_bytes: int) -> list[list[nn.Parameter]]:
    """Deal parameters, in order, into lists that are closed once they hold enough bytes; one dtype to a list."""
    parts: list[list[nn.Parameter]] = []
    held, limit = 0, first_bytes
    for parameter in parameters:
        same = bool(parts) and parts[-1][0].dtype == parameter.dtype and parts[-1][0].device == parameter.device
        if same and held < limit:
            parts[-1].append(parameter)
        else:
            limit = first_bytes if not parts else bucket_bytes
            parts.append([parameter])
            held = 0
        held += parameter.numel() * parameter.element_size()
    return parts


def _check_same_model(model: nn.Module, comm: Communicator) -> None:
    described = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    for rank, other in enumerate(comm.roll_call(described)):
        if other != described:
            mine = next((a for a, b in zip(described, other, strict=False) if a != b), described[-1:])
            theirs = next((b for a, b in zip(described, other, strict=False) if a != b), other[-1:])
            raise MismatchError(
                f"rank {comm.rank} and rank {rank} built different models: {mine} here, {theirs} there, of "
                f"{len(described)} and {len(other)} tensors: build the same model on every rank"
            )

"""c10d's operators, each mapped onto our collectives.

    c10d._allgather_base_(out, shard)
      └▶ Operators._allgather_base_(out, shard)
           └▶ stream.launch(all_gather)        minidist.full.collectives, counted, traced, on the clock

A group has a stream, and all of its collectives go there, in the order in which they are called,
waited for at once or later: torch lets one rank wait where another does not. Messages (`send`,
`recv_`) are posted by the rank's own thread.

Calls are checked before anything is sent. In debug mode, which is on unless MINIDIST_DEBUG=0, the
ranks compare each collective before it begins, and a difference is a `MismatchError`. `timeout`, of
a call or a group, is taken and not used: how long a rank may wait is the job's `limit`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

import minidist.full.collectives as collectives
from minidist.full.collectives.operations import check_root
from minidist.full.comm.agree import agree
from minidist.full.comm.communicator import Communicator
from minidist.full.comm.errors import MismatchError
from minidist.torch_backend.checks import (
    agree_on_dtypes,
    check_count,
    check_outputs,
    check_room,
    check_whole,
    elements,
)
from minidist.torch_backend.ranks import RANKS
from minidist.torch_backend.tensors import Flat, flat, joined, reduction_of, spread
from minidist.torch_backend.to_self import ToSelf
from minidist.torch_backend.work import Line, Working


class Operators:
    """c10d's operators on a communicator, each a method of torch's name. A method takes what the
    operator takes, without the group; the last arguments say how to wait, which is not used here.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.stream, self.line, self.to_self = comm, comm.stream(), Line(), ToSelf()

    def _launch(
        self,
        work: Callable[[Communicator], object],
        outputs: Sequence[Tensor],
        landing: Sequence[Flat] = (),
        leaving: Sequence[Flat] = (),
    ) -> Working:
        """Launch `work(comm)` on the stream; then what arrived lands in its tensors. `leaving` is
        what lands nowhere.
        """
        check_outputs(work.__name__, outputs)
        working = Working(list(outputs), self.line, self.line.number())

        def run() -> None:
            try:
                with torch.inference_mode():  # tensors of that mode change in it alone
                    agree_on_dtypes(self.stream.comm, work.__name__, [*landing, *leaving])
                    work(self.stream.comm)
                    for part in landing:
                        part.land()
            except BaseException as error:
                working.arrive(error)
                raise
            working.arrive()

        run.__name__ = work.__name__
        job: Any = self.stream.launch(run)

        def done() -> bool:
            if not job.done:
                self.comm.hand_over()  # who polls lets others go on, where one runs at a time
            return bool(job.done)

        def finish() -> None:
            if not RANKS.beside():
                job.wait()
                return
            while not job.done:  # the rank's own thread may wait as well
                self.comm.hand_over()  # which raises once the job has failed
                time.sleep(0.001)
            if job.error is not None:
                raise job.error

        return working.begun(finish, done)

    def all_of(self, works: list[Working]) -> Working:
        """Return the works of one call as one."""
        if len(works) == 1:
            return works[0]
        together = Working([], self.line)
        return together.begun(
            lambda: [work.wait() for work in works],
            lambda: all(work.is_completed() for work in works),
        )

    # ---------------------------------------------------------------- reductions

    def allreduce_(self, outputs: list[Tensor], op: Any, *_: Any) -> Working:
        names = [reduction_of(op, tensor) for tensor in outputs]
        parts = flat(outputs)

        def all_reduce(comm: Communicator) -> None:
            for part, name in zip(parts, names, strict=True):
                collectives.all_reduce(part.buffer, comm, name)

        return self._launch(all_reduce, outputs, parts)

    allreduce_coalesced_ = allreduce_

    def reduce_(self, tensors: list[Tensor], op: Any, at: int, *_: Any) -> Working:
        (tensor,) = tensors
        check_root(at, self.comm)
        name = reduction_of(op, tensor)
        part = Flat(tensor)

        def reduce(comm: Communicator) -> None:
            collectives.reduce(part.buffer, comm, at, name)

        lands = self.comm.rank == at
        return self._launch(reduce, [tensor], [part] * lands, [part] * (not lands))

    def reduce_scatter_(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], op: Any, *_: Any
    ) -> Working:
        (output,), parts = outputs, flat(inputs[0])
        check_count(self.comm, "reduce_scatter", "input tensors", len(parts))
        counts = [len(part.buffer) for part in parts]
        return self._reduce_scatter(output, lambda: joined(parts), counts, op)

    def _reduce_scatter_base_(self, output: Tensor, whole: Tensor, op: Any, *_: Any) -> Working:
        part = Flat(whole)
        check_whole(self.comm, "reduce_scatter_tensor", "input", whole, output)
        counts = [output.numel() * part.unit] * self.comm.size
        return self._reduce_scatter(output, lambda: part.buffer, counts, op)

    def _reduce_scatter(
        self, output: Tensor, whole: Callable[[], Tensor], counts: list[int], op: Any
    ) -> Working:
        name = reduction_of(op, output)
        target = Flat(output)
        if len(target.buffer) != counts[self.comm.rank]:
            raise ValueError(
                f"reduce_scatter: rank {self.comm.rank} has an output of {output.numel()} elements "
                f"for an input of {counts[self.comm.rank] // target.unit}: give both one size"
            )

        def reduce_scatter(comm: Communicator) -> None:
            shard = collectives.reduce_scatter(whole(), comm, name, counts=counts)
            target.buffer.copy_(shard)

        return self._launch(reduce_scatter, [output], [target])

    def reduce_scatter_tensor_coalesced_(
        self, outputs: list[Tensor], inputs: list[Tensor], op: Any, *_: Any
    ) -> Working:
        pairs = zip(outputs, inputs, strict=True)
        return self.all_of([self._reduce_scatter_base_(*pair, op) for pair in pairs])

    # ---------------------------------------------------------------- moving

    def broadcast_(self, outputs: list[Tensor], at: int, *_: Any) -> Working:
        check_root(at, self.comm)
        parts = flat(outputs)

        def broadcast(comm: Communicator) -> None:
            for part in parts:
                collectives.broadcast(part.buffer, comm, at)

        return self._launch(broadcast, outputs, parts)

    def allgather_(
        self, outputs: Sequence[Sequence[Tensor]], inputs: list[Tensor], *_: Any
    ) -> Working:
        (targets,), (shard,) = outputs, inputs
        check_count(self.comm, "all_gather", "output tensors", len(targets))
        own, parts = Flat(shard), flat(targets)
        counts = [len(part.buffer) for part in parts]
        if len(own.buffer) != counts[self.comm.rank]:
            raise ValueError(
                f"all_gather: rank {self.comm.rank} brings {shard.numel()} elements for an output "
                f"of {counts[self.comm.rank] // own.unit}: give both one size"
            )

        def all_gather(comm: Communicator) -> None:
            spread(collectives.all_gather(own.buffer, comm, counts=counts), parts)

        return self._launch(all_gather, targets, leaving=[own])

    def allgather_coalesced_(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any
    ) -> Working:
        """`outputs[rank][i]` is the rank's `inputs[i]`."""
        check_count(self.comm, "all_gather_coalesced", "lists of output tensors", len(outputs))
        for targets in outputs:
            if len(targets) != len(inputs):
                raise ValueError(
                    f"all_gather_coalesced: {len(targets)} output tensors from a rank that brings "
                    f"{len(inputs)}: give one for each"
                )
        pairs = zip(zip(*outputs, strict=True), inputs, strict=True)
        return self.all_of([self.allgather_([arriving], [shard]) for arriving, shard in pairs])

    def _allgather_base_(self, output: Tensor, shard: Tensor, *_: Any) -> Working:
        check_whole(self.comm, "all_gather_into_tensor", "output", output, shard)
        target, own = Flat(output), Flat(shard)
        counts = [len(own.buffer)] * self.comm.size

        def all_gather(comm: Communicator) -> None:
            collectives.all_gather(own.buffer, comm, out=target.buffer, counts=counts)

        return self._launch(all_gather, [output], [target])

    def allgather_into_tensor_coalesced_(
        self, outputs: list[Tensor], inputs: list[Tensor], *_: Any
    ) -> Working:
        pairs = zip(outputs, inputs, strict=True)
        return self.all_of([self._allgather_base_(*pair) for pair in pairs])

    def gather_(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], at: int, *_: Any
    ) -> Working:
        (shard,) = inputs
        check_root(at, self.comm)
        targets: list[Tensor] = []
        if self.comm.rank == at:
            (targets,) = outputs
            check_count(self.comm, "gather", "output tensors", len(targets))
        own, parts = Flat(shard), flat(targets)

        def gather(comm: Communicator) -> None:
            agree(comm, "gather", shard.dtype, root=at)
            brought = comm.all_gather_object(len(own.buffer) // own.unit)
            whole = collectives.gather(own.buffer, comm, at)
            if whole is None:
                return
            check_room("gather", brought, parts)
            spread(whole, parts)

        return self._launch(gather, targets, leaving=[own])

    def scatter_(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], at: int, *_: Any
    ) -> Working:
        (output,) = outputs
        check_root(at, self.comm)
        parts: list[Flat] = []
        target = Flat(output)
        if self.comm.rank == at:
            parts = flat(inputs[0])
            check_count(self.comm, "scatter", "input tensors", len(parts))
            sizes = {len(part.buffer) // part.unit for part in parts}
            if sizes != {output.numel()}:
                raise ValueError(
                    f"scatter: tensors of {sorted(sizes)} elements do not all fit an output of "
                    f"{output.numel()}: give all one size"
                )

        def scatter(comm: Communicator) -> None:
            shard = collectives.scatter(joined(parts) if parts else None, comm, at)
            if shard.dtype != target.buffer.dtype or len(shard) != len(target.buffer):
                raise MismatchError(
                    f"scatter: rank {at} sends {len(shard)} elements of {shard.dtype}, rank "
                    f"{comm.rank} has room for {len(target.buffer)} of {target.buffer.dtype}"
                )
            target.buffer.copy_(shard)

        return self._launch(scatter, [output], [target])

    def alltoall_(self, outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> Working:
        check_count(self.comm, "all_to_all", "input tensors", len(inputs))
        check_count(self.comm, "all_to_all", "output tensors", len(outputs))
        leaving, arriving = flat(inputs), flat(outputs)
        sent = [len(part.buffer) for part in leaving]
        received = [len(part.buffer) for part in arriving]

        def all_to_all(comm: Communicator) -> None:
            full = joined(leaving)
            whole = collectives.all_to_all(full, comm, send_counts=sent, receive_counts=received)
            spread(whole, arriving)

        return self._launch(all_to_all, outputs, leaving=leaving)

    def alltoall_base_(
        self,
        output: Tensor,
        whole: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        *_: Any,
    ) -> Working:
        leaving, arriving = Flat(whole), Flat(output)
        sent = elements(self.comm, "input", leaving, input_sizes)
        received = elements(self.comm, "output", arriving, output_sizes)

        def all_to_all(comm: Communicator) -> None:
            arrived = collectives.all_to_all(
                leaving.buffer, comm, send_counts=sent, receive_counts=received
            )
            arriving.buffer.copy_(arrived)

        return self._launch(all_to_all, [output], [arriving])

    def barrier(self, *_: Any, name: str = "barrier") -> Working:
        def barrier(comm: Communicator) -> None:
            agree(comm, name)
            comm.barrier()

        return self._launch(barrier, [])

    # ---------------------------------------------------------------- messages

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Working:
        (tensor,) = tensors
        working = Working([tensor], self.line, source=self.comm.rank)
        if to == self.comm.rank:
            self.to_self.send(Flat(tensor).buffer, tag)
            return working.begun(lambda: None, lambda: True)
        message = self.comm.isend(Flat(tensor).buffer, to, tag)
        return working.begun(message.wait, message.test)

    def recv_(self, tensors: list[Tensor], source: int, tag: int) -> Working:
        check_outputs("recv", tensors)
        (tensor,) = tensors
        part = Flat(tensor)
        if source == self.comm.rank:
            arrive, test = self.to_self.receive(part.buffer, tag)
        else:
            message: Any = self.comm.irecv(part.buffer, source, tag)
            arrive, test = message.wait, message.test

        def finish() -> None:
            with torch.inference_mode():
                arrive()
                part.land()

        return Working([tensor], self.line, source=source).begun(finish, test)

    def recv_any_source_(self, *_: Any) -> NoReturn:
        raise NotImplementedError(
            "minidist has no receive from any source, so that what a program does never depends on "
            "who was faster: name the sender, recv(tensor, src=...)"
        )

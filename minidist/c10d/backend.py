"""The process group: each of c10d's calls, mapped onto our collectives.

    dist.all_gather_into_tensor(out, shard)
      └▶ MinidistGroup.all_gather_single(out, shard, opts)
           └▶ stream.launch(all_gather)        minidist.collectives, counted, traced, on the clock

A group has a stream, and all of its collectives go there, in the order in which they are called,
waited for at once or later: torch lets one rank wait where another does not. Messages (`send`,
`recv`) are posted by the rank's own thread.

Calls are checked before anything is sent. In debug mode, which is on unless MINIDIST_DEBUG=0, the
ranks compare each collective before it begins, and a difference is a `MismatchError`. `timeout`, of
a call or a group, is taken and not used: how long a rank may wait is the job's `limit`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from minidist import collectives
from minidist.c10d.checks import (
    agree_on_dtypes,
    check_count,
    check_room,
    check_whole,
    elements,
)
from minidist.c10d.ranks import RANKS
from minidist.c10d.tensors import Flat, flat, joined, listed, op_of, reduction_of, spread
from minidist.c10d.to_self import ToSelf
from minidist.c10d.work import Line, Working
from minidist.comm.agree import agree
from minidist.comm.communicator import Communicator
from minidist.comm.errors import MismatchError


class MinidistGroup(dist.ProcessGroup):
    """A process group on a communicator."""

    def __init__(self, comm: Communicator, name: str) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]  # as Python's groups may
        self.comm, self._name, self._description = comm, name, ""
        self.stream, self.line, self.to_self = comm.stream(), Line(), ToSelf()

    # C++ asks by these names, Python by the properties
    def getBackendName(self) -> str:
        return "minidist"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _device_types = property(lambda self: [torch.device("cpu")])

    def shutdown(self) -> None:
        """Run the callbacks that nobody has waited for, unless an error ends the program. Else
        nothing is open but the stream, which ends when nobody holds the group.
        """
        if sys.exception() is None:
            self.line.complete()

    def abort(self) -> None:
        """As `shutdown`."""

    def __repr__(self) -> str:
        return f"MinidistGroup({self.comm.name!r}, rank {self.comm.rank} of {self.comm.size})"

    def _launch(
        self,
        work: Callable[[Communicator], object],
        outputs: list[Tensor],
        landing: Sequence[Flat] = (),
        leaving: Sequence[Flat] = (),
    ) -> Working:
        """Launch `work(comm)` on the stream; then what arrived lands in its tensors. `leaving` is
        what lands nowhere.
        """

        working = Working(outputs, self.line, self.line.number())

        def run() -> None:
            try:
                with torch.no_grad():
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

    def _all_of(self, outputs: list[Tensor]) -> Working:
        """Return the operations that were just launched as one: the stream runs them in order."""

        def together(comm: Communicator) -> None:
            """Nothing is left to do."""

        return self._launch(together, outputs)

    # ---------------------------------------------------------------- reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Working:
        outputs = listed(tensors)
        op = op_of(opts)
        names = [reduction_of(op, tensor) for tensor in outputs]
        parts = flat(outputs)

        def all_reduce(comm: Communicator) -> None:
            for part, (name, factor) in zip(parts, names, strict=True):
                if factor is not None:
                    part.buffer.mul_(factor)
                collectives.all_reduce(part.buffer, comm, name)

        return self._launch(all_reduce, outputs, parts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Working:
        return self.allreduce(tensors, opts)

    def reduce(
        self, tensors: Any, root: Any = None, op: Any = None, timeout: Any = None
    ) -> Working:
        (tensor,) = listed(tensors)
        at = root if isinstance(root, int) else root.rootRank
        name, factor = reduction_of(op_of(op if isinstance(root, int) else root), tensor)
        part = Flat(tensor)

        def reduce(comm: Communicator) -> None:
            buffer = part.buffer if factor is None else part.buffer * factor
            collectives.reduce(buffer, comm, at, name)
            if factor is not None and comm.rank == at:
                part.buffer.copy_(buffer)

        lands = self.comm.rank == at
        return self._launch(reduce, [tensor], [part] * lands, [part] * (not lands))

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> Working:
        (output,) = listed(outputs)
        parts = flat(inputs[0] if isinstance(inputs[0], list | tuple) else inputs)
        check_count(self.comm, "reduce_scatter", "input tensors", len(parts))
        counts = [len(part.buffer) for part in parts]
        return self._reduce_scatter(output, lambda: joined(parts), counts, opts)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Working:
        part = Flat(whole)
        check_whole(self.comm, "reduce_scatter_tensor", "input", whole, output)
        counts = [output.numel() * part.unit] * self.comm.size
        return self._reduce_scatter(output, lambda: part.buffer, counts, opts)

    def _reduce_scatter(
        self, output: Tensor, whole: Callable[[], Tensor], counts: list[int], opts: Any
    ) -> Working:
        name, factor = reduction_of(op_of(opts), output)
        target = Flat(output)
        if len(target.buffer) != counts[self.comm.rank]:
            raise ValueError(
                f"reduce_scatter: rank {self.comm.rank} has an output of {output.numel()} elements "
                f"for an input of {counts[self.comm.rank] // target.unit}: give both one size"
            )

        def reduce_scatter(comm: Communicator) -> None:
            full = whole() if factor is None else whole() * factor
            target.buffer.copy_(collectives.reduce_scatter(full, comm, name, counts=counts))

        return self._launch(reduce_scatter, [output], [target])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Working:
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole, opts)
        return self._all_of(outputs)

    # ---------------------------------------------------------------- moving

    def broadcast(self, tensors: Any, root: Any = None, timeout: Any = None) -> Working:
        outputs = listed(tensors)
        at = root if isinstance(root, int) else root.rootRank
        parts = flat(outputs)

        def broadcast(comm: Communicator) -> None:
            for part in parts:
                collectives.broadcast(part.buffer, comm, at)

        return self._launch(broadcast, outputs, parts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Working:
        (shard,) = listed(inputs)
        targets = outputs[0] if isinstance(outputs[0], list | tuple) else outputs
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

        return self._launch(all_gather, list(targets), leaving=[own])

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Working:
        """`outputs[rank][i]` is the rank's `inputs[i]`."""
        check_count(self.comm, "all_gather_coalesced", "lists of output tensors", len(outputs))
        for targets in outputs:
            if len(targets) != len(inputs):
                raise ValueError(
                    f"all_gather_coalesced: {len(targets)} output tensors from a rank that brings "
                    f"{len(inputs)}: give one for each"
                )
        for arriving, shard in zip(zip(*outputs, strict=True), inputs, strict=True):
            self.allgather([list(arriving)], [shard])
        return self._all_of([tensor for targets in outputs for tensor in targets])

    def all_gather_single(self, output: Tensor, shard: Tensor, opts: Any = None) -> Working:
        check_whole(self.comm, "all_gather_into_tensor", "output", output, shard)
        target, own = Flat(output), Flat(shard)
        counts = [len(own.buffer)] * self.comm.size

        def all_gather(comm: Communicator) -> None:
            collectives.all_gather(own.buffer, comm, out=target.buffer, counts=counts)

        return self._launch(all_gather, [output], [target])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Working:
        for output, shard in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, shard)
        return self._all_of(outputs)

    def gather(self, outputs: Any, inputs: Any, root: Any = None, timeout: Any = None) -> Working:
        (shard,) = listed(inputs)
        at = root if isinstance(root, int) else root.rootRank
        targets: list[Tensor] = []
        if self.comm.rank == at:
            targets = list(outputs[0] if isinstance(outputs[0], list | tuple) else outputs)
            check_count(self.comm, "gather", "output tensors", len(targets))
        own, parts = Flat(shard), flat(targets)

        def gather(comm: Communicator) -> None:
            agree(comm, "gather", shard.dtype, root=at)
            brought = comm.roll_call(len(own.buffer) // own.unit)
            whole = collectives.gather(own.buffer, comm, at)
            if whole is None:
                return
            check_room("gather", brought, parts)
            spread(whole, parts)

        return self._launch(gather, list(targets), leaving=[own])

    def scatter(self, outputs: Any, inputs: Any, root: Any = None, timeout: Any = None) -> Working:
        (output,) = listed(outputs)
        at = root if isinstance(root, int) else root.rootRank
        parts: list[Flat] = []
        target = Flat(output)
        if self.comm.rank == at:
            parts = flat(inputs[0] if isinstance(inputs[0], list | tuple) else inputs)
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

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Working:
        check_count(self.comm, "all_to_all", "input tensors", len(inputs))
        check_count(self.comm, "all_to_all", "output tensors", len(outputs))
        leaving, arriving = flat(inputs), flat(outputs)
        sent = [len(part.buffer) for part in leaving]
        received = [len(part.buffer) for part in arriving]

        def all_to_all(comm: Communicator) -> None:
            full = joined(leaving)
            whole = collectives.all_to_all(full, comm, send_counts=sent, receive_counts=received)
            spread(whole, arriving)

        return self._launch(all_to_all, list(outputs), leaving=leaving)

    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        opts: Any = None,
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

    def barrier(self, opts: Any = None) -> Working:
        def barrier(comm: Communicator) -> None:
            agree(comm, "barrier")
            comm.barrier()

        return self._launch(barrier, [])

    # ---------------------------------------------------------------- messages

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Working:
        (tensor,) = tensors
        working = Working([tensor], self.line, source=self.comm.rank)
        if to == self.comm.rank:
            self.to_self.send(Flat(tensor).buffer, tag)
            return working.begun(lambda: None, lambda: True)
        message = self.comm.isend(Flat(tensor).buffer, to, tag)
        return working.begun(message.wait, message.test)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Working:
        (tensor,) = tensors
        part = Flat(tensor)
        if source == self.comm.rank:
            arrive, test = self.to_self.receive(part.buffer, tag)
        else:
            message: Any = self.comm.irecv(part.buffer, source, tag)
            arrive, test = message.wait, message.test

        def finish() -> None:
            arrive()
            with torch.no_grad():
                part.land()

        return Working([tensor], self.line, source=source).begun(finish, test)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> NoReturn:
        raise NotImplementedError(
            "minidist has no receive from any source, so that what a program does never depends on "
            "who was faster: name the sender, recv(tensor, src=...)"
        )

    # names that torch has given up, or keeps for its own
    _allgather_base: Any = all_gather_single
    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced
    _reduce_scatter_base: Any = reduce_scatter_single
    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced
    alltoall_base: Any = all_to_all_single

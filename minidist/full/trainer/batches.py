"""Batches of tokens for one rank, prepared while the previous ones are being trained on.

    sample     c  o  m  p  u  t  e        T + 1 tokens
    inputs     c  o  m  p  u  t           [b, T]
    targets       o  m  p  u  t  e        [b, T]: each token is predicted from those before it

A global batch is padded to its longest sample, and each rank makes its own rows of it. A thread
makes the next batches while the rank computes. A checkpoint counts only the batches that were used:
a resumed run makes the others again.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import torch

from minidist.full.comm.job.background import BackgroundThread
from minidist.full.data.packed import Packed
from minidist.full.data.text import Samples, TextError
from minidist.full.ddp.sampler import DistributedSampler, Indices, State, share

Columns: TypeAlias = Callable[[int], torch.Tensor]
IGNORED = -100  # the target that torch's cross_entropy leaves out by default


class Batch(NamedTuple):
    """One rank's rows of a global batch.

    Attributes
    ----------
    inputs, targets : int64 tensors [b, T]
        b may be 0, when there are fewer rows than ranks: such a rank still takes part in every
        collective. Padding is token 0 in the inputs and `IGNORED` in the targets.
    first_row : int
        Row 0 here is row `first_row` of the global batch; a dropout mask depends on it.
    positions : int or tensor [T]
        The first column's position, or that of each column, in the whole sequence.
    tokens : int
        Targets that count in the *global* batch, on all ranks: what the sum of the losses is
        divided by.
    documents : tensor [b, T of the whole sequence], optional
        Where the document of each token begins, if rows have several. It stays on the CPU, where who
        sees whom is decided.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    first_row: int
    tokens: int
    positions: int | torch.Tensor = 0
    documents: torch.Tensor | None = None

    def microbatches(self, count: int) -> "list[Batch]":
        """Cut the rows into `count` microbatches, for gradient accumulation or a pipeline.

        Always `count`, even if some are empty: ranks must agree on the number. Each keeps the
        `tokens` of the global batch, so their gradients simply add up.
        """
        return [self._rows(share(len(self.inputs), count, number)) for number in range(count)]

    def _rows(self, cut: slice) -> "Batch":
        return self._replace(
            inputs=self.inputs[cut],
            targets=self.targets[cut],
            first_row=self.first_row + cut.start,
            documents=None if self.documents is None else self.documents[cut],
        )

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, which a GPU can fetch from while the CPU goes
        on.
        """
        return self._replace(inputs=self.inputs.pin_memory(), targets=self.targets.pin_memory())

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on a device; from pinned memory, without waiting for the copy."""
        inputs, targets = (
            tensor.to(device, non_blocking=True) for tensor in (self.inputs, self.targets)
        )
        return self._replace(inputs=inputs, targets=targets)


class Batches:
    """This rank's part of one global batch after the other, epoch after epoch, without end.

    The last global batch of an epoch is what is left: no sample is dropped, none comes twice.

    Parameters
    ----------
    samples : Samples or Packed
        From `sequences` or `documents`, packed or not; the same on every rank.
    sampler : DistributedSampler
        Deals these samples out to the ranks.
    multiple : int
        Pad rows to a multiple of so many tokens: context and sequence parallelism share them out
        evenly.
    columns : callable, optional
        From the tokens of a padded row to the positions of this rank's columns; see `positions` of
        context parallelism.
    """

    def __init__(
        self,
        samples: Samples | Packed,
        sampler: DistributedSampler,
        multiple: int = 1,
        columns: Columns | None = None,
    ) -> None:
        self.samples, self.sampler = samples, sampler
        self.multiple, self.columns = multiple, columns
        self._checksum = samples.checksum()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from map(self._batch, self.sampler.rest_of_epoch())

    def first(self, count: int) -> Iterator[Batch]:
        """Yield the first batches of an epoch, or with a count of 0 all."""
        return islice(self.epoch(), count or None)

    def epoch(self) -> Iterator[Batch]:
        """Yield one whole epoch, without moving the position: for measuring on held-out text."""
        return map(self._batch, self.sampler.epoch_batches(0))

    def state_dict(self) -> State:
        """Return where the batches stand, the same on every rank; fit for JSON."""
        return self.sampler.state_dict() | {"checksum": self._checksum}

    def load_state_dict(self, state: State) -> None:
        """Continue with the batch after the last one before `state` was taken, on any number of
        ranks.

        Raises
        ------
        TextError
            If the state belongs to another text, or to another way of cutting it.
        ValueError
            If the samples would come in another order (see `DistributedSampler.load_state_dict`).
        """
        if state["checksum"] != self._checksum:
            checksums = f"checksum {state['checksum']:#x}, now {self._checksum:#x}"
            fix = "use the same text, tokenizer and sequence length, or start the data afresh"
            raise TextError(f"the saved position belongs to other samples ({checksums}): {fix}")
        self.sampler.load_state_dict(state)

    def _batch(self, whole: Indices) -> Batch:
        mine = share(len(whole), self.sampler.ranks, self.sampler.rank)
        lengths = self.samples.lengths[whole]  # [rows of the global batch]
        # The width, too, is that of the global batch: every rank sees the shapes of the serial run.
        width = -(-(int(lengths.max()) - 1) // self.multiple) * self.multiple
        rows = self.samples.filled(whole[mine], width, IGNORED)
        inputs, targets = torch.from_numpy(rows.inputs), torch.from_numpy(rows.targets)
        batch = Batch(inputs, targets, mine.start, tokens=int(lengths.sum()) - len(whole))
        if rows.documents is not None:
            batch = batch._replace(documents=torch.from_numpy(rows.documents))
        if self.columns is None:
            return batch
        positions = self.columns(width)  # of tokens whose targets are beside them already
        return batch._replace(
            inputs=inputs[:, positions], targets=targets[:, positions], positions=positions
        )


class ReadAhead(Iterator[Batch], AbstractContextManager["ReadAhead"]):
    """Prepares the next batches in a thread of its own.

    Use it in a `with` block, which ends the thread.

    The thread is a daemon: a program that dies without closing it is not kept alive.

    Parameters
    ----------
    source : Batches
        They belong to the thread from now on: load their state before.
    depth : int
        How many batches are kept ready, at least 1.
    pin : bool
        Put them into pinned memory (CUDA only), so that copies to the GPU overlap with its work.

    Raises
    ------
    ValueError
        If `depth` is less than 1, or if `pin` is wanted without a GPU.
    """

    def __init__(self, source: Batches, depth: int = 2, pin: bool = False) -> None:
        if depth < 1:
            raise ValueError(f"depth = {depth}: at least one batch has to be read ahead")
        if pin and not torch.cuda.is_available():
            raise ValueError(
                "pin = True, but there is no CUDA device here: pinned memory serves copies to a "
                "GPU only"
            )
        self._source = source
        # A new thread would start on device 0, and every rank of the node would take memory there.
        self._pin_for = torch.cuda.current_device() if pin else None
        # with the state just after each
        self._ready: SimpleQueue[tuple[Batch, State] | BaseException] = SimpleQueue()
        self._room = threading.Semaphore(depth)  # how many more batches are wanted
        self._consumed = source.state_dict()
        self._closed: RuntimeError | None = None
        self._thread = BackgroundThread(self._read, name="read-ahead")
        self._thread.start()

    def __next__(self) -> Batch:
        """Return the next batch, waiting for it if need be.

        Raises
        ------
        StopIteration
            If the source has ended.
        RuntimeError
            If this was closed: a training loop must not take that for the end of the data.
        BaseException
            What the source raised, with its own traceback, once the batches before it are used up.
        """
        entry = self._closed or self._ready.get()
        if isinstance(entry, BaseException):
            self._ready.put(entry)  # it stays at its end
            raise entry
        batch, self._consumed = entry
        self._room.release()
        return batch

    def state_dict(self) -> State:
        """Return the state after the last batch *handed out*.

        Those read ahead will be read again after a restart.
        """
        return dict(self._consumed)

    def close(self) -> None:
        """End the thread.

        It ends at once while waiting, and after its batch while preparing one.
        """
        self._closed = RuntimeError("no batch can be read after close(): create a new ReadAhead")
        self._ready.put(self._closed)  # for a consumer that waits, as the thread may wait for room
        self._room.release()
        self._thread.join(timeout=1.0)  # a source that is stuck must not hold us up as well

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        try:
            if self._pin_for is not None:
                torch.cuda.set_device(self._pin_for)
            batches = iter(self._source)
            while self._room.acquire() and not self._closed:
                with self._thread.working():
                    batch = next(batches)
                    batch = batch if self._pin_for is None else batch.pin_memory()
                    self._ready.put((batch, self._source.state_dict()))
        except BaseException as error:
            # everything: the consumer would wait for ever for a thread that died
            self._ready.put(error)  # StopIteration, if all went well

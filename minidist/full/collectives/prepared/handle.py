"""`prepare` and the handle it returns: MPI's persistent collective operations.

    plain     check ─ compare ─ choose ─ allocate ─ cut ─▶ messages
    handle    ─────────── once, by prepare ────────────   messages, messages, messages, ...

A small message takes as long as the Python around it, and a handle leaves most of that out. It
computes the same bits, and sends the same messages, as the plain call. (MPI 4.0, section 6.13.)
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from minidist.full.collectives import operations
from minidist.full.collectives.choose import COLLECTIVES
from minidist.full.collectives.prepared.noting import Notes, Noting
from minidist.full.comm.agree import agree
from minidist.full.comm.buffers import Buffer, is_tensor
from minidist.full.comm.communicator import Communicator


class Prepared:
    """A collective that is ready to be called: `handle()` returns what the plain call would.

    Attributes
    ----------
    operation, algorithm : str
        What was prepared, and the algorithm that was chosen; empty on one rank, where there may be
        nothing to do.
    comm : Communicator
    result : Buffer or None
        What each call returns: the *same* buffer, which the next call fills anew.
    """

    def __init__(
        self, operation: str, comm: Communicator, notes: Notes, buffers: list[Any], result: Any
    ) -> None:
        self.operation, self.comm, self.result = operation, comm, result
        self.algorithm, self.steps = notes.algorithm, notes.take()
        self.number = comm.keep(Made, Made).number()
        watched = [buffer for buffer in [*buffers, result] if buffer is not None]
        self.arrays = [(each, each.shape, each.dtype) for each in watched if not is_tensor(each)]
        self.tensors = [(each, place_of(each)) for each in watched if is_tensor(each)]
        self.__name__ = operation  # for a stream, whose events bear the names of what it runs
        self._play = named(operation, _play)

    def __call__(self) -> Any:
        """Run the collective again. Every rank calls it.

        Raises
        ------
        ValueError
            If a buffer has another shape, dtype or memory than when it was prepared.
        MismatchError
            In debug mode, if the ranks do not call the same handle.
        """
        return self._play(self)


class Made:
    """How many handles a communicator has made: the same on every rank."""

    def __init__(self) -> None:
        self.handles = 0

    def number(self) -> int:
        """Return the number of another handle."""
        self.handles += 1
        return self.handles


def prepare(operation: str, buffer: Buffer | None, comm: Communicator, **options: Any) -> Prepared:
    """Return a handle of `operation(buffer, comm, **options)`. Collective, and so is each call.

    Everything that depends on sizes is done here, once: buffers are checked and cut, in debug mode
    the ranks compare what they prepare, shapes and counts that ranks must tell each other are
    told, the algorithm is chosen, results and temporaries are allocated. On MPI the messages of an
    exchange become persistent requests, and MPI's own collectives persistent ones. Nothing is sent
    or computed.

    A handle keeps its buffers, so on a GPU keep the handle until what it has launched was waited
    for. It belongs to the thread that uses `comm`: a stream launches handles
    of `stream.comm`.

    Parameters
    ----------
    operation : str
        One of `COLLECTIVES`.
    options
        As of the operation: `op`, `algorithm`, `root`, `out`, `counts`, ...

    Raises
    ------
    ValueError, TypeError, MismatchError
        As the operation itself.
    """
    if operation not in COLLECTIVES:
        raise ValueError(
            f"there is no collective {operation!r} to prepare: choose one of "
            f"{', '.join(COLLECTIVES)}"
        )
    if options.get("dim"):
        raise ValueError(
            f"dim={options['dim']} copies: prepare with dim=0, and move the axis yourself"
        )
    agree(comm, "prepare", operation)
    notes = Notes()
    result = getattr(operations, operation)(buffer, Noting(comm, notes), **options)
    return Prepared(operation, comm, notes, [buffer, options.get("out")], result)


class PreparedLater:
    """A handle that its first call prepares: for a stream, whose thread alone uses `stream.comm`.

        reduce = PreparedLater("all_reduce", bucket, stream.comm)
        stream.launch(reduce)

    Arguments are those of `prepare`. What is wrong with them is found by the first call.
    """

    def __init__(
        self, operation: str, buffer: Buffer | None, comm: Communicator, **options: Any
    ) -> None:
        self.__name__ = operation
        self._prepare = partial(prepare, operation, buffer, comm, **options)
        self._handle: Prepared | None = None

    def __call__(self) -> Any:
        """Run the collective. Every rank calls it."""
        if self._handle is None:
            self._handle = self._prepare()
        return self._handle()


def place_of(tensor: Any) -> tuple[object, ...]:
    """Return what must not change of a tensor: its shape, its dtype, and where it is."""
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.data_ptr()


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function under another name: reports of who waits, and tracebacks, read names off
    the stack.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=name, co_qualname=name)
    return FunctionType(code, function.__globals__, name)


def _play(handle: Prepared) -> Any:
    for array, shape, dtype in handle.arrays:
        # Where it is need not be asked: numpy moves no memory while somebody else uses it.
        if array.shape != shape or array.dtype != dtype:
            raise _moved(handle, array, (shape, dtype))
    for tensor, place in handle.tensors:
        if place_of(tensor) != place:
            raise _moved(handle, tensor, place)
    if handle.comm.ledger.debug:
        agree(handle.comm, f"handle {handle.number}, {handle.operation}")
    for step in handle.steps:
        step()
    return handle.result


def _moved(handle: Prepared, buffer: Any, place: tuple[Any, ...]) -> ValueError:
    shape, dtype = place[:2]
    now = f"{buffer.dtype} of shape {tuple(buffer.shape)}"
    if (shape, dtype) == (buffer.shape, buffer.dtype):
        now = "in other memory"
    return ValueError(
        f"this {handle.operation} was prepared for a {dtype} buffer of shape {tuple(shape)}, "
        f"which is {now} by now, but a handle uses the memory that it was given: prepare it again, "
        "on all ranks"
    )

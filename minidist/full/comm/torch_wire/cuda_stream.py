"""A stream of collectives that is a CUDA stream: the GPU itself runs them beside the caller's work.

    caller's stream   backward ...... ─┐ launch ...... backward ...... ┌─ handle.wait()
    side stream                        └▶ all_reduce(bucket) ── event ─┘

No thread is needed: launching queues the work on the side stream and returns before the GPU has
begun. Waiting blocks no host thread either, it makes the waiter's stream wait for the event. How
long that one stood still is known only later: see `stalls.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch.utils._pytree import tree_leaves

from minidist.full.comm.stream import Comm, Stream
from minidist.full.comm.torch_wire.stalls import Stalls
from minidist.full.trace.events import EventKind


@dataclass
class CudaJob(Generic[Comm]):
    """Work queued on the side stream, and the event behind it."""

    caller: Comm
    name: str
    result: Any
    event: torch.cuda.Event
    stalls: Stalls

    def wait(self) -> Any:
        """Make the current stream wait until the work is done; return its result."""
        with self.caller.span(f"wait for {self.name}", EventKind.WAIT):
            current = torch.cuda.current_stream()
            with self.stalls.one():
                current.wait_event(self.event)
            for tensor in _tensors(self.result):
                tensor.record_stream(current)
        return self.result


class CudaStream(Stream[Comm]):
    """A stream on the GPU. `comm` is what its work communicates on."""

    def __init__(self, caller: Comm, stalls: Stalls) -> None:
        self.caller, self.comm, self.stalls = caller, caller.fork(), stalls
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def launch(self, work: Callable[..., Any], *args: Any) -> CudaJob[Comm]:
        """Queue `work(*args)` behind what the current stream has been given so far, and return at
        once.

        Tensors that `work` uses belong among its arguments: only these are kept from being reused
        too early.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = work(*args)
            event = self.stream.record_event()
        # freed by its owner, its memory is not reused before this stream is done with it
        for tensor in _tensors(args):
            tensor.record_stream(self.stream)
        name = getattr(work, "__name__", "work")
        return CudaJob(self.caller, name, result, event, self.stalls)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the CUDA tensors in a value of nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_cuda]

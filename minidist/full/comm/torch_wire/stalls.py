"""How long the CUDA stream that computes stands still because it waits for other ranks.

    host      ... wait() ─▶ event, wait, event ─▶ launches on ...
    stream    kernels ─ event ├── a stall ──┤ event ─ kernels

The host does not wait, so its clock says nothing of it: the GPU notes the times itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stalls:
    """Notes the stalls of one stream, from `begin` to `end`. Waits of other streams, which run
    beside it, are none.
    """

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """Note the stalls of the current stream from here on."""
        self.stream, self.events = torch.cuda.current_stream(), []
        self.began = _note(self.stream)

    @contextmanager
    def one(self) -> Iterator[None]:
        """Note that the body makes the current stream wait, if it is the one that computes."""
        if self.stream is None or (stream := torch.cuda.current_stream()) != self.stream:
            yield
            return
        before = _note(stream)
        yield
        self.events.append((before, _note(stream)))

    def computed(self) -> float:
        """Return for how many seconds the stream has not stood still since `begin`. Blocks until the
        GPU has come so far.
        """
        assert self.stream is not None, "begin() comes first"
        now = _note(self.stream)
        now.synchronize()
        return _between(self.began, now) - self._stood()

    def end(self) -> float:
        """Note no more; return for how many seconds the stream has stood still since `begin`. The
        host must have waited for the GPU to come so far.
        """
        stood = self._stood()
        self.stream, self.events = None, []
        return stood

    def _stood(self) -> float:
        return sum(_between(*pair) for pair in self.events)


def _note(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    stream.record_event(event)
    return event


def _between(before: torch.cuda.Event, after: torch.cuda.Event) -> float:
    """Return seconds."""
    return float(before.elapsed_time(after)) / 1e3

"""A default generator for each simulated rank, as a process would have.

torch has one default generator a process. Simulated ranks would draw from it in the order in which
their threads happen to run. So each rank has a generator, and for the time of one operation that
draws it takes the place of the process's:

    torch.randn(4)  ──▶  lock, put the rank's state in, draw, take the state out, unlock

torch marks every operation that draws (`Tag.nondeterministic_seeded`), dropout's included. They are
caught where torch dispatches them, so it does not matter which function a program called. While one
draws no rank waits for another, so that the lock cannot make a deadlock.

Not covered, because they are the process's own: Python's `random`, `numpy.random`, and the methods
of `torch.default_generator` itself (`torch.manual_seed` and its like are covered). An operation that
is given `generator=torch.default_generator` draws from the rank's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from minidist.torch_backend.ranks import RANKS

PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
ONE_AT_A_TIME = threading.RLock()
PROCESS: Any = torch.default_generator


@cache
def draws(operation: Any) -> bool:
    """Tell whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operation.tags


class OwnGenerator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, what this thread draws comes from `generator`."""

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert generator is not None
        self.generator = generator

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile and torch.export do their work: what they have compiled draws here."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not draws(func) or FakeTensor in types:
            return func(*args, **kwargs)
        if not PLAIN.issuperset(types):
            return NotImplemented  # a DTensor: what it does with its local tensor comes here again
        given = kwargs.get("generator")
        if given is not None and given._cdata != PROCESS._cdata:
            return func(*args, **kwargs)  # from a generator of its own
        with ONE_AT_A_TIME:
            before = PROCESS.get_state()
            PROCESS.set_state(self.generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self.generator.set_state(PROCESS.get_state())
                PROCESS.set_state(before)


class DefaultGenerator:
    """Stands for torch's default generator where torch seeds it: `torch.manual_seed`,
    `get_rng_state` and their like.
    """

    def __getattr__(self, name: str) -> Any:
        rank = RANKS.simulated()
        generator = None if rank is None else rank.generator
        return getattr(PROCESS if generator is None else generator, name)


@contextmanager
def default_generators() -> Iterator[None]:
    """Have `torch.manual_seed` and its like ask for the rank's own generator during the body."""
    seeding: Any = torch.random
    seeding.default_generator = DefaultGenerator()
    try:
        yield
    finally:
        seeding.default_generator = PROCESS

"""Competitors take turns on one device, if its memory has room for all of them.

    build A ─▶ two steps ─▶ peak of a third         A stays
    build B ─▶ two steps ─▶ peak of a third         A and B stay
    A A A │ B B B │ A A A │ B B B │ ...             seconds of a step, by round: `alternate`

What stays of a competitor between its steps is counted before the next is built, so each peak is of
one alone. If there is no room for all, each is measured alone, as a case that says so: no two of
them shared a moment, and no bound is met.
"""

import contextlib
import gc
from collections.abc import Iterator, Sequence

import torch

from minidist.bench.gpu.competitors import Work, build
from minidist.bench.measure import ROUND, Run, alternate
from minidist.bench.subject import Counted, Setting
from minidist.bench.subjects.zero import allocated, most_allocated
from minidist.bench.training import expect_same
from minidist.full.trainer.metrics import known_peak

# about, of one competitor in one round on a GPU: many steps, as a GPU slows down when it gets warm
SECONDS = 1.0
ROUNDS = 5
SAME = 0.01  # the first losses differ by less than this part, or a competitor trains another model


def side_by_side(
    names: Sequence[str], work: Work, setting: Setting, how: str = ""
) -> Iterator[Counted]:
    """Yield what a step of each of these competitors takes: seconds, GiB at its peak, share of a
    GPU's peak.
    """
    found: list[Counted] = []
    with contextlib.suppress(torch.OutOfMemoryError):
        found = take_turns(names, work, setting, f"{work.name}{how}")
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()  # without a GPU it does nothing
    yield from found
    if not found and len(names) > 1:
        for name in names:
            yield from side_by_side([name], work, setting, ", one by one")


def take_turns(names: Sequence[str], work: Work, setting: Setting, case: str) -> list[Counted]:
    """As `side_by_side`, but leave freeing to the caller.

    Raises
    ------
    torch.OutOfMemoryError
        If there is no room for all of them, or so little that torch had to free what it keeps for
        the next step.
    RuntimeError
        If their first losses show that they do not train the same model.
    """
    on_gpu = work.device.type == "cuda"
    steps: dict[str, Run] = {}
    losses: dict[str, object] = {}
    peaks: dict[str, list[float]] = {}
    for name in names:
        before = torch.cuda.memory_allocated() if on_gpu else allocated()
        steps[name] = build(name, work, setting.comm)[1]
        losses[name] = steps[name]()
        steps[name]()
        most = most_on_gpu(steps[name]) if on_gpu else most_allocated(steps[name])
        peaks[name] = [(most - before) / (1 << 30)]
    expect_same(losses, SAME)
    freed = torch.cuda.memory_stats().get("num_alloc_retries")
    rounds, seconds = setting.options.rounds or ROUNDS, SECONDS if on_gpu else ROUND
    times = alternate(steps, setting.comm, rounds, seconds)
    if torch.cuda.memory_stats().get("num_alloc_retries") != freed and len(names) > 1:
        raise torch.OutOfMemoryError
    peak = known_peak(torch.cuda.get_device_name()) if on_gpu else 0.0
    shares = {
        name: [work.flops / each / peak for each in values]
        for name, values in times.items()
        if peak
    }
    return [
        Counted(case, times, flops=work.flops),
        Counted(f"{case}, peak", peaks, "GiB"),
        Counted(f"{case}, share of the peak", shares, ""),
    ]


def most_on_gpu(step: Run) -> int:
    """Return the most bytes that are allocated on the GPU at a time while a step runs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()

"""A training step under ZeRO: minidist's stages, and torch's `fully_shard`.

    local          forward, backward, AdamW; the ranks never talk
    DDP            minidist.full.DDP, for ZeRO-1 and ZeRO-2 to be compared with
    ZeRO-1 ... 3   minidist.full.ZeRO1, ZeRO2 and FSDP, each block a unit
    fully_shard    torch.distributed.fsdp.fully_shard of each block and of the model, over gloo

Peak bytes are the most that malloc had given out, sampled every 0.3 ms from before the model is
built to the end of the third step, plus minidist's registered memory, which does not come from
malloc.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

from torch import nn

from minidist.bench.measure import Run
from minidist.bench.subject import Case, Counted, Setting, subject
from minidist.bench.training import BATCH, TIME, gpt, text, training_step
from minidist.full import DDP, FSDP, ZeRO1, ZeRO2
from minidist.full.comm import Communicator
from minidist.full.model import GPT

Build: TypeAlias = Callable[[Communicator], Run]
Strategy: TypeAlias = Callable[[GPT, Communicator], nn.Module]
# malloc.h
MALL_INFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


@subject(peers=("local", "DDP", "fully_shard"))
def zero(setting: Setting) -> Iterator[Case | Counted]:
    """Seconds of a training step at every width; then MiB at the peak of three."""
    strategies: dict[str, Strategy] = {"local": lambda model, _: model}
    ours = {"DDP": DDP, "ZeRO-1": ZeRO1, "ZeRO-2": ZeRO2, "ZeRO-3": FSDP}
    strategies |= {name: partial(kind, op="sum") for name, kind in ours.items()}
    if setting.gloo is not None:
        strategies["fully_shard"] = by_torch
    for hidden in setting.options.hidden:
        case = f"D={hidden}, {BATCH} x {TIME}"
        builds = {name: partial(step_of, strategy, hidden) for name, strategy in strategies.items()}
        yield Case(case, {name: build(setting.comm) for name, build in builds.items()})
        for name, build in builds.items():
            peak = peak_bytes(build, setting.comm.split(0)) / (1 << 20)
            yield Counted(f"{case}, peak", {name: [peak]}, "MiB")


def step_of(strategy: Strategy, hidden: int, comm: Communicator) -> Run:
    """Return the step of a model that is spread by this strategy, each rank on a text of its
    own.
    """
    return training_step(strategy(gpt(hidden), comm), text(seed=comm.rank))


def by_torch(model: GPT, _: Communicator) -> nn.Module:
    """Shard the model by torch."""
    from torch.distributed.fsdp import fully_shard

    for module in (*model.layers, model):
        fully_shard(module)
    return model


def peak_bytes(build: Build, comm: Communicator) -> int:
    """Return the most bytes that were held at a time while a step was built and taken three
    times.
    """

    def three_steps() -> None:
        step = build(comm)
        for _ in range(3):
            step()

    gc.collect()  # so that nothing from before is freed meanwhile
    before = allocated()
    return (
        most_allocated(three_steps)
        - before
        + sum(bytes for _, bytes, _ in comm.registered.windows.values())
    )


def most_allocated(work: Run) -> int:
    """Return the most bytes that this process had from malloc at a time while `work` ran, sampled
    every 0.3 ms.
    """
    most, done = allocated(), threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.0003):
            most = max(most, allocated())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return most


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALL_INFO.split()]


def allocated() -> int:
    """Return the bytes that this process has from malloc and has not freed, in all threads."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)  # in use, and mapped by itself

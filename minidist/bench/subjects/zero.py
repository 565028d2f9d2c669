"""A training step under ZeRO: minidist's stages, and torch's `fully_shard`.

    local          forward, backward, AdamW; the ranks never talk
    DDP            minidist.parallel.DDP, for ZeRO-1 and ZeRO-2 to be compared with
    ZeRO-1 ... 3   minidist.parallel.ZeRO1, ZeRO2 and FSDP, each block a unit
    fully_shard    torch.distributed.fsdp.fully_shard of each block and of the model, over gloo

Peak bytes are the most that malloc had given out, sampled every 0.3 ms from before the model is built to the end of the
third step, plus minidist's registered memory, which does not come from malloc.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from minidist.bench.measure import Run
from minidist.bench.subject import Case, Counted, Setting, subject
from minidist.bench.training import BATCH, TIME, gpt, text, training_step
from minidist.comm import Communicator
from minidist.parallel import DDP, FSDP, ZeRO1, ZeRO2
from minidist.parallel.replica import Alone

Build = Callable[[Communicator], Run]
MALL_INFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # malloc.h
STRATEGIES = {"DDP": DDP, "ZeRO-1": ZeRO1, "ZeRO-2": ZeRO2, "ZeRO-3": FSDP}


@subject(peers=("local", "DDP", "fully_shard"))
def zero(setting: Setting) -> Iterator[Case | Counted]:
    """Seconds of a training step at every width; then MiB at the peak of three."""
    for hidden in setting.options.hidden:
        builds = competitors(hidden, text(seed=setting.comm.rank), torch_too=setting.gloo is not None)
        case = f"D={hidden}, {BATCH} x {TIME}"
        yield Case(case, {name: build(setting.comm) for name, build in builds.items()})
        for name, build in builds.items():
            peak = peak_bytes(build, setting.comm.split(0)) / (1 << 20)
            yield Counted(f"{case}, peak", {name: [peak]}, "MiB")


def competitors(hidden: int, tokens: Tensor, torch_too: bool) -> dict[str, Build]:
    """Return what builds each competitor's step."""

    def ours(strategy: Callable[..., Any], comm: Communicator) -> Run:
        return training_step(strategy(gpt(hidden), comm), tokens, tokens[:, 1:].numel() * comm.size)

    def by_torch(_: Communicator) -> Run:
        from torch.distributed.fsdp import fully_shard

        model = gpt(hidden)
        for module in (*model.layers, model):
            fully_shard(module)
        return training_step(Alone(model), tokens)

    builds: dict[str, Build] = {"local": lambda _: training_step(Alone(gpt(hidden)), tokens)}
    builds |= {name: partial(ours, strategy) for name, strategy in STRATEGIES.items()}
    return builds | ({"fully_shard": by_torch} if torch_too else {})


def peak_bytes(build: Build, comm: Communicator) -> int:
    """Return the most bytes that were held at a time while a step was built and taken three times."""

    def three_steps() -> None:
        step = build(comm)
        for _ in range(3):
            step()

    gc.collect()  # so that nothing from before is freed meanwhile
    before = allocated()
    return most_allocated(three_steps) - before + sum(bytes for _, bytes, _ in comm.registered.windows.values())


def most_allocated(work: Run) -> int:
    """Return the most bytes that this process had from malloc at a time while `work` ran, sampled every 0.3 ms."""
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

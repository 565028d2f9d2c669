"""A training step under ZeRO: minidist's stages, and torch's `fully_shard`.

    local          forward, backward, AdamW; the ranks never talk
    DDP            minidist.parallel.DDP, for ZeRO-1 and ZeRO-2 to be compared with
    ZeRO-1 ... 3   minidist.parallel.ZeRO1, ZeRO2 and FSDP, each block a unit
    fully_shard    torch.distributed.fsdp.fully_shard of each block and of the model, over gloo

Peak bytes are what malloc had given out, looked at every 0.3 ms from before the model is built to the end of the third
step, and minidist's registered memory, which comes from elsewhere.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from minidist.bench.measure import Measurement, Run, alternate
from minidist.bench.options import Options
from minidist.bench.subjects.training import COMPUTING, LAYERS, ROUNDS, training_step
from minidist.model import GPT, GPTConfig
from minidist.parallel import DDP, FSDP, ZeRO1, ZeRO2

if TYPE_CHECKING:
    from minidist.comm import Communicator

BATCH, TIME = COMPUTING
Build = Callable[["Communicator"], Run]


def bench_zero(options: Options, launch: str, comm: Communicator, gloo: Any) -> Iterator[Measurement]:
    """Measure at every width: seconds of a step, then MiB at the peak of three."""
    tokens = torch.randint(256, (BATCH, TIME + 1), generator=torch.Generator().manual_seed(comm.rank))
    for hidden in options.hidden:
        builds = competitors(hidden, tokens, torch_too=gloo is not None)
        case = f"D={hidden}, {BATCH} x {TIME}"
        runs = {name: build(comm) for name, build in builds.items()}
        for name, seconds in alternate(runs, comm, options.rounds or ROUNDS).items():
            yield Measurement("zero", case, name, launch, seconds, ranks=comm.size)
        del runs
        for name, build in builds.items():
            peak = peak_bytes(build, comm.split(0)) / (1 << 20)
            yield Measurement("zero", f"{case}, peak", name, launch, (peak,), "MiB", ranks=comm.size)


def competitors(hidden: int, tokens: torch.Tensor, torch_too: bool) -> dict[str, Build]:
    """Return what builds each competitor's step."""
    everyones = tokens[:, 1:].numel()

    def build() -> GPT:
        return GPT(GPTConfig(vocabulary=256, layers=LAYERS, hidden=hidden, heads=4, sequence=TIME))

    def wrapped(strategy: Callable[..., Any], comm: Communicator) -> Run:
        return training_step(strategy(build(), comm), tokens, everyones * comm.size)

    def by_torch(_: Communicator) -> Run:
        from torch.distributed.fsdp import fully_shard

        model = build()
        for module in (*model.layers, model):
            fully_shard(module)
        return training_step(model, tokens)

    builds: dict[str, Build] = {"local": lambda _: training_step(build(), tokens)}
    strategies = {"DDP": DDP, "ZeRO-1": ZeRO1, "ZeRO-2": ZeRO2, "ZeRO-3": FSDP}
    builds |= {name: partial(wrapped, strategy) for name, strategy in strategies.items()}
    return builds | ({"fully_shard": by_torch} if torch_too else {})


def peak_bytes(build: Build, comm: Communicator) -> int:
    """Return the most bytes that were held at a time while a step was built and taken three times."""
    gc.collect()  # of what was there before, nothing shall be freed meanwhile
    before, most, done = allocated(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.0003):
            most = max(most, allocated())

    watcher = threading.Thread(target=watch)
    watcher.start()
    step = build(comm)
    for _ in range(3):
        step()
    done.set()
    watcher.join()
    return most - before + sum(bytes for _, bytes, _ in comm.registered.windows.values())


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(f"other_{at}", ctypes.c_size_t) for at in range(4)]
    _fields_ += [("mapped", ctypes.c_size_t), ("other_5", ctypes.c_size_t), ("other_6", ctypes.c_size_t)]
    _fields_ += [("in_use", ctypes.c_size_t), ("free", ctypes.c_size_t), ("top", ctypes.c_size_t)]


def allocated() -> int:
    """Return the bytes that this process has from malloc and has not freed, in all threads."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallInfo
    info = mallinfo2()
    return int(info.in_use + info.mapped)

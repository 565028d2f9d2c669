"""A training step: without communication, with minidist's data parallelism, and with torch's.

    local        forward, backward, AdamW; the ranks never talk
    DDP          minidist.parallel.DDP
    naive        minidist.parallel.NaiveDataParallel: one all-reduce a parameter, after backward
    torch DDP    torch.nn.parallel.DistributedDataParallel over gloo

Each has a model and an optimizer of its own, and they take turns step by step. The loops are those of each one's
documentation; what is measured is the whole step, zeroing of gradients included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from minidist.bench.measure import Measurement, Run, alternate
from minidist.bench.options import Options
from minidist.model import GPT, GPTConfig
from minidist.parallel import DDP, DataParallel, NaiveDataParallel
from minidist.parallel.sharded.shard import Sharded

if TYPE_CHECKING:
    from minidist.comm import Communicator

ROUNDS = 8
LAYERS = 4
COMPUTING = (8, 128)  # sequences and tokens of each a rank: computing dominates
COMMUNICATING = (1, 64)  # communication does


def bench_training(options: Options, launch: str, comm: Communicator, gloo: Any) -> Iterator[Measurement]:
    """Measure a step at every width; at the widest also with a batch so small that communication dominates."""
    widest = max(options.hidden)
    shapes = [(hidden, *COMPUTING) for hidden in options.hidden] + [(widest, *COMMUNICATING)]
    for hidden, batch, time in shapes:
        runs = steps(comm, hidden, batch, time, torch_too=gloo is not None)
        case = f"D={hidden}, {batch} x {time}"
        # About one step a round: a step is long, and what slows the machine for seconds shall hit all of them.
        rounds = options.rounds or (ROUNDS if (batch, time) == COMPUTING else 2 * ROUNDS)
        for name, values in alternate(runs, comm, rounds).items():
            yield Measurement("ddp", case, name, launch, values, ranks=comm.size)


def steps(comm: Communicator, hidden: int, batch: int, time: int, torch_too: bool) -> dict[str, Run]:
    """Return one training step of each competitor, by name."""
    tokens = torch.randint(256, (batch, time + 1), generator=torch.Generator().manual_seed(comm.rank))

    def build() -> GPT:
        return GPT(GPTConfig(vocabulary=256, layers=LAYERS, hidden=hidden, heads=4, sequence=time))

    everyones = comm.size * tokens[:, 1:].numel()  # minidist sums gradients of losses divided by all ranks' tokens
    runs: dict[str, Run] = {"local": training_step(build(), tokens)}
    runs["DDP"] = training_step(DDP(build(), comm), tokens, everyones)
    runs["naive"] = training_step(NaiveDataParallel(build(), comm), tokens, everyones)
    if torch_too:
        runs["torch DDP"] = training_step(torch.nn.parallel.DistributedDataParallel(build()), tokens)
    return runs


def training_step(model: torch.nn.Module, tokens: torch.Tensor, divisor: int = 0) -> Run:
    """Return a step whose loss is divided by `divisor`, or by this rank's tokens: then gradients are to be averaged."""
    if isinstance(model, Sharded):
        optimizer = model.optimizer(torch.optim.AdamW, lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def step() -> None:
        model.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        (loss / (divisor or targets.numel())).backward()  # type: ignore[no-untyped-call]
        if isinstance(model, DataParallel):
            model.synchronize()
        optimizer.step()

    return step

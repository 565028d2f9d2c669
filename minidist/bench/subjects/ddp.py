"""A training step: without communication, with minidist's data parallelism, and with torch's.

    local        forward, backward, AdamW; the ranks never talk
    DDP          minidist.parallel.DDP
    naive        minidist.parallel.NaiveDataParallel: one all-reduce a parameter, after backward
    torch DDP    torch.nn.parallel.DistributedDataParallel over gloo

Each has a model and an optimizer of its own, and they take turns step by step. The loops are those of each one's
documentation; what is measured is the whole step, zeroing of gradients included.
"""

from collections.abc import Iterator

import torch

from minidist.bench.subject import Case, Setting, subject
from minidist.bench.training import BATCH, TIME, gpt, text, training_step
from minidist.parallel import DDP, NaiveDataParallel
from minidist.parallel.replica import Alone

FEW = (1, 64)  # sequences and tokens: communication dominates


@subject(peers=("local", "torch DDP"))
def ddp(setting: Setting) -> Iterator[Case]:
    """Seconds of a training step at every width; at the widest also with so small a batch that messages dominate."""
    comm, hiddens = setting.comm, setting.options.hidden
    for hidden, batch, time in [*((hidden, BATCH, TIME) for hidden in hiddens), (max(hiddens), *FEW)]:
        tokens = text(batch, time, seed=comm.rank)
        everyones = comm.size * batch * time  # minidist sums gradients of losses divided by all ranks' tokens
        runs = {
            "local": training_step(Alone(gpt(hidden, time)), tokens),
            "DDP": training_step(DDP(gpt(hidden, time), comm), tokens, everyones),
            "naive": training_step(NaiveDataParallel(gpt(hidden, time), comm), tokens, everyones),
        }
        if setting.gloo is not None:
            theirs = torch.nn.parallel.DistributedDataParallel(gpt(hidden, time))
            runs["torch DDP"] = training_step(Alone(theirs), tokens)
        # About one step a round: a step is long, and what slows the machine for seconds should slow all competitors.
        yield Case(f"D={hidden}, {batch} x {time}", runs, rounds=2 * ddp.rounds if (batch, time) == FEW else 0)

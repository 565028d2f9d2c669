"""A training step: without communication, with minidist's data parallelism, and with torch's.

    local        forward, backward, AdamW; the ranks never talk
    DDP          minidist.full.DDP
    naive        minidist.full.NaiveDataParallel: one all-reduce a parameter, after backward
    torch DDP    torch.nn.parallel.DistributedDataParallel over gloo

Each has a model and an optimizer of its own, and they take turns step by step. The loops are those
of each one's documentation; what is measured is the whole step, zeroing of gradients included.
"""

from collections.abc import Iterator

from torch import nn

from minidist.bench.subject import Case, Setting, subject
from minidist.bench.training import BATCH, TIME, gpt, text, training_step
from minidist.full import DDP, NaiveDataParallel

FEW = (1, 64)  # sequences and tokens: communication dominates


@subject(peers=("local", "torch DDP"))
def ddp(setting: Setting) -> Iterator[Case]:
    """Seconds of a training step at every width; at the widest also with so small a batch that
    messages dominate.
    """
    comm, hiddens = setting.comm, setting.options.hidden
    for hidden, batch, time in [
        *((hidden, BATCH, TIME) for hidden in hiddens),
        (max(hiddens), *FEW),
    ]:
        tokens = text(batch, time, seed=comm.rank)
        models = {
            "local": gpt(hidden, time),
            "DDP": DDP(gpt(hidden, time), comm, op="sum"),
            "naive": NaiveDataParallel(gpt(hidden, time), comm, op="sum"),
        }
        if setting.gloo is not None:
            models["torch DDP"] = nn.parallel.DistributedDataParallel(gpt(hidden, time))
        runs = {name: training_step(model, tokens) for name, model in models.items()}
        # About one step a round: a step is long, and what slows the machine for seconds should slow
        # all competitors.
        yield Case(
            f"D={hidden}, {batch} x {time}",
            runs,
            rounds=2 * ddp.rounds if (batch, time) == FEW else 0,
        )

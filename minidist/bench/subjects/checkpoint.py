"""A checkpoint of a model and its AdamW state, split by tensor parallelism: how long does training
stand still?

    synchronous     from the call until the disk has it
    stall           asynchronous: until training goes on, with the copy made and the writer at work
    steps           some training steps; beside a writer, and alone

Both write the same, to the folder for temporary files.
"""

import itertools
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from minidist.bench.measure import timed
from minidist.bench.subject import Counted, Setting, subject
from minidist.bench.training import VOCABULARY, gpt, text
from minidist.full import Recipe, parallelize, vocabulary_parallel_cross_entropy_sum
from minidist.full.checkpoint.saving import Writer, pieces_to_save
from minidist.full.comm import Communicator
from minidist.full.mesh import Layout, Mesh
from minidist.full.precision.masters import MasterWeights

STEPS = 5  # of training, beside the writer


@subject(peers=("synchronous", "steps alone"), gloo=False)
def checkpoint(setting: Setting) -> Iterator[Counted]:
    """Seconds of one save, and of a training step, at every width."""
    comm = setting.comm
    for hidden in setting.options.hidden:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
            # all write to rank 0's folder
            writer = Writer(Path(comm.all_gather_object(own)[0]), comm, keep=1, every=0)
            seconds = measure(hidden, comm, writer, setting.options.rounds or checkpoint.rounds)
        yield Counted(f"D={hidden}", seconds)


def measure(
    hidden: int,
    comm: Communicator,
    writer: Writer,
    rounds: int,
) -> dict[str, list[float]]:
    """Return the seconds of each round, of a model over all ranks."""
    model, mesh, tokens = gpt(hidden), Mesh(comm, Layout(tp=comm.size)), text(batch=4)
    loss = partial(vocabulary_parallel_cross_entropy_sum, comm=mesh.tp, vocabulary=VOCABULARY)
    parallel = parallelize(model, mesh, Recipe(), loss)
    optimizer = parallel.optimizer(
        MasterWeights, model.parameters(), optimizer=torch.optim.AdamW, lr=1e-4
    )
    numbers = itertools.count(1)

    def step() -> None:
        parallel.zero_grad()
        parallel.step([tokens[:, :-1]], [tokens[:, 1:]])
        optimizer.step(factor=1 / tokens[:, 1:].numel())

    def save() -> None:
        writer.save(next(numbers), pieces_to_save(parallel, optimizer), {})

    def save_and_wait() -> None:
        save()
        writer.wait()

    seconds: dict[str, list[float]] = {
        name: [] for name in ("synchronous", "stall", "steps beside", "steps alone")
    }
    step()
    save_and_wait()  # has the memory for the copy
    for _ in range(rounds):
        seconds["synchronous"].append(timed(save_and_wait, comm, 1))
        seconds["steps alone"].append(timed(step, comm, STEPS))
        seconds["stall"].append(timed(save, comm, 1))
        seconds["steps beside"].append(timed(step, comm, STEPS))
        writer.wait()
    return seconds

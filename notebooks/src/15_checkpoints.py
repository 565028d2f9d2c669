# %% [markdown]
# # 15 · Checkpoints and failures
#
# Four ranks (dp=2, tp=2, ZeRO 1) save one GPT. Every row is a matrix of the model, flattened; the
# colour is the rank that writes the element. Every element has one colour: each is written once,
# and by a rank that holds it.

# %%
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy as np
import torch

import minidist
from minidist import Layout, Mesh, checkpoint
from minidist.draw.notebook import picture, show
from minidist.draw.recording import record
from minidist.full import Recipe, parallelize, vocabulary_parallel_cross_entropy_sum
from minidist.full.checkpoint import index, restore, saving, store
from minidist.full.checkpoint.cadence import daly, shares, young
from minidist.full.checkpoint.pieces import Extent, Piece, put
from minidist.full.collectives import all_reduce
from minidist.full.model import GPT, GPTConfig, cross_entropy_sum
from minidist.full.precision import MasterWeights
from minidist.tensor import Block

SIZES = GPTConfig(vocabulary=32, layers=1, hidden=16, heads=4, intermediate=32, sequence=8)
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]


def build(comm, layout, zero=1, seed=0):
    """Return a GPT spread over a mesh, its optimizer, and what takes a step."""
    mesh = Mesh(comm, layout)
    model = GPT(SIZES, torch.Generator().manual_seed(seed), dtype=torch.float64)

    def loss(logits, targets):
        if layout.tp == 1:
            return cross_entropy_sum(logits, targets) / 32
        return vocabulary_parallel_cross_entropy_sum(logits, targets, mesh.tp, 32) / 32

    parallel = parallelize(model, mesh, Recipe(zero=zero), loss)
    groups = [{"params": list(model.parameters())}]
    optimizer = parallel.optimizer(MasterWeights, groups, optimizer=torch.optim.AdamW, lr=0.01)

    def step(number):
        tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(number))
        rows = tokens.chunk(mesh.dp.size)[mesh.dp.rank]
        parallel.zero_grad()
        loss = parallel.step([rows[:, :-1]], [rows[:, 1:]]).double().reshape(1)
        optimizer.step()
        all_reduce(loss, mesh.dp)
        return loss.item()

    return parallel, optimizer, step


def extents(comm):
    """Return the extents that this rank writes of each matrix."""
    parallel, optimizer, _ = build(comm, Layout(dp=2, tp=2))
    return {
        piece.name: piece.extent
        for piece in saving.pieces_to_save(parallel, optimizer)
        if len(piece.extent.shape) > 1
    }


def draw_writers(ranks, file):
    """Draw who writes which elements."""
    names = list(dict.fromkeys(name for held in ranks for name in held))
    figure, panel = plt.subplots(figsize=(8.4, 3.4))
    for row, name in enumerate(names):
        shape = next(held[name].shape for held in ranks if name in held)
        owner = torch.full((shape[0] * shape[1],), -1)
        for rank, held in enumerate(ranks):
            if name in held:
                put(torch.full((held[name].count,), rank), held[name], owner.view(shape))
        assert (owner >= 0).all()
        edges = [0, *(np.flatnonzero(np.diff(owner.numpy())) + 1).tolist(), len(owner)]
        for start, stop in pairwise(edges):
            panel.barh(row, stop - start, left=start, color=COLOURS[owner[start]], height=0.8)
    panel.set(
        yticks=range(len(names)), yticklabels=names, xlabel="element of the whole matrix, flattened"
    )
    panel.invert_yaxis()
    panel.legend(
        [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS[:4]],
        [f"rank {rank}: dp {rank // 2}, tp {rank % 2}" for rank in range(4)],
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        frameon=False,
    )
    figure.savefig(file, dpi=105, bbox_inches="tight", format="png")
    plt.close(figure)


held = minidist.run(extents, ranks=4)
picture(
    lambda file: draw_writers(held, file),
    "Nine matrices, flattened, coloured by the rank that writes which elements, of dp=2 and tp=2. "
    "Most are in two halves; two that are cut along the other dim alternate between ranks in "
    "short stripes.",
)

# %% [markdown]
# Matrices cut by columns (`output`, `down`) alternate, row by row: such pieces are no run of the
# whole, and the index says so (`dim`, `block`).
#
# ## What does each rank write?
#
# **Predict:** without ZeRO both replicas hold the same. Which ranks write how many elements,
# parameters and Adam's state together, and how does ZeRO 1 change that?


# %%
def elements(comm, zero):
    parallel, optimizer, step = build(comm, Layout(dp=2, tp=2), zero)
    step(0)
    return sum(piece.extent.count for piece in saving.pieces_to_save(parallel, optimizer))


print(
    "\n".join(
        f"ZeRO {zero}: {minidist.run(lambda comm, zero=zero: elements(comm, zero), ranks=4)}"
        for zero in (0, 1)
    )
)

# %% [markdown]
# ## Resume exactly
#
# Six steps in one go; or three, a checkpoint, a new process, three more. **Predict:** on the same
# four ranks, do the losses agree to the last bit? And if the run goes on with tp=4, dp=4, or as one
# rank?


# %%
def train(comm, folder, layout, first, last):
    """Take steps first to last; begin from the checkpoint if first is not 0, and leave one if last
    is 3.
    """
    parallel, optimizer, step = build(comm, layout, seed=first)  # other weights, to be overwritten
    if first:
        saving.load_pieces(folder / f"step-{first:08d}", parallel, optimizer)
        parallel.stepped()
    losses = [step(number) for number in range(first, last)]
    if last == 3:
        writer = saving.Writer(folder, comm, keep=1, every=0)
        writer.save(last, saving.pieces_to_save(parallel, optimizer), {})
        writer.wait()
    return losses


def run(folder, layout, first, last):
    return minidist.run(lambda comm: train(comm, folder, layout, first, last), layout.size)[0]


with TemporaryDirectory() as name:
    mesh = Layout(dp=2, tp=2)
    whole = run(Path(name), mesh, 0, 6)
    lines = ["in one go         " + " ".join(f"{loss:.6f}" for loss in whole)]
    run(Path(name), mesh, 0, 3)
    for layout in (mesh, Layout(tp=4), Layout(dp=4), Layout()):
        again = run(Path(name), layout, 3, 6)
        far = max(abs(a - b) for a, b in zip(again, whole[3:], strict=True))
        words = (
            "the same bits"
            if layout == mesh and far == 0
            else "the same to 12 digits"
            if far < 1e-11
            else "DIFFERENT"
        )
        lines.append(
            f"goes on as dp={layout.dp} tp={layout.tp} "
            + " ".join(f"{loss:.6f}" for loss in again)
            + f"  {words}"
        )
print("\n".join(lines))

# %% [markdown]
# <details><summary>The answer</summary>
#
# The same layout gives the same bits. Another layout adds in another order, so its losses differ by
# rounding errors.
#
# </details>
#
# ## Who reads what?
#
# A tensor of 16 elements, saved by two ranks. **Predict:** rank 1 of three wants elements 5 to 11.
# Which files does it open, and how many elements of each does it need?

# %%
with TemporaryDirectory() as name:
    store.begin(Path(name), 5)
    shards = []
    for rank, start in enumerate((0, 8)):
        piece = Piece(
            "w", Extent((16,), None, 0, 0, start, start + 8), torch.arange(start, start + 8)
        )
        shards.append(store.write_shard(Path(name, ".unfinished-00000005"), rank, [piece]))
    path = store.commit(Path(name), 5, shards, {})
    lines = sorted(file.name for file in path.iterdir())
    wanted = Piece("w", Extent((16,), None, 0, 0, 5, 11), torch.empty(6, dtype=torch.int64))
    for extent, file in index.parse((path / "index.json").read_text())["w"].pieces:
        needed = max(0, min(extent.stop, 11) - max(extent.start, 5))
        lines.append(f"{file} has {extent.start} to {extent.stop}: {needed} of them are wanted")
    restore.read(path, [wanted])
    lines.append(f"found {wanted.tensor.tolist()}")
print("\n".join(lines))

# %% [markdown]
# Here is the page of the book, `minidist/checkpoint.py`, on four ranks. Each saves its quarter of a
# tensor, and then the same ranks load it as two replicas of two halves. A colour shows whose numbers
# a cell holds. The messages are those of barriers (one before anybody writes, one before anybody may
# believe that there is a checkpoint), and names of pieces. The numbers go by the disk.


# %%
def piece(start, tensor):
    """Return some elements of a tensor of 8."""
    whole = Block((8,), dim=0, first=0, last=8)
    return checkpoint.Piece("w", whole, start, tensor)


def save_and_load(comm, folder):
    quarter = torch.full((2,), float(comm.contribution), dtype=torch.float64)
    comm.watch("its quarter", quarter)
    half = comm.watch("its half, loaded", torch.zeros(4, dtype=torch.float64), cells=2)
    path = checkpoint.save(folder, 5, [piece(2 * comm.rank, quarter)], {}, comm)
    mesh = Mesh(comm, Layout(dp=2, tp=2))
    checkpoint.load(path, [piece(4 * mesh.tp.rank, half)])


with TemporaryDirectory() as name:
    recording = record(
        lambda comm: save_and_load(comm, Path(name)),
        ranks=4,
    )
show(recording, frames=3)

# %% [markdown]
# ## Break it: a disk that is damaged
#
# **Predict:** one byte of one file is changed. When does the run notice it, and what does it do?

# %%
with TemporaryDirectory() as name:
    run(Path(name), Layout(dp=2), 0, 3)
    path = Path(name, "step-00000003")
    file = path / "rank-0001.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    try:
        restore.verify(path)
    except store.CheckpointError as error:
        print(str(error).replace(name, "runs/a"))

# %% [markdown]
# ## Break it: written into place
#
# Both functions below write the same three files. `yield` marks the moments in which they may be
# killed. **Predict:** at which of these moments does a reader that takes the newest folder find
# half a checkpoint?


# %%
def into_place(folder):
    (folder / "step-5").mkdir()
    for file in ("rank-0", "rank-1", "index"):
        yield
        (folder / "step-5" / file).touch()
    yield


def aside(folder):
    (folder / ".unfinished").mkdir()
    for file in ("rank-0", "rank-1", "index"):
        yield
        (folder / ".unfinished" / file).touch()
    yield
    (folder / ".unfinished").rename(folder / "step-5")
    yield


def survivors(save, moments):
    found = []
    for moment in range(moments):
        with TemporaryDirectory() as name:
            job = save(Path(name))
            for _ in range(moment):
                next(job)
            there = list(Path(name).glob("step-5/*"))
            found.append(f"{len(there)}/3" if Path(name, "step-5").exists() else "-")
    return "  ".join(found)


print("into place ", survivors(into_place, 5))
print("aside      ", survivors(aside, 6))

# %% [markdown]
# ## How often?
#
# 1,024 GPUs, each of which fails once in five years; writing takes a minute, a restart five.
# **Predict:** where is the best interval, and how sharp is it?


# %%
def draw_cadence(file):
    """Draw the shares of time against the interval."""
    mtbf, write, again = 5 * 365 * 86400 / 1024, 60.0, 300.0
    every = np.geomspace(120, 120_000, 60)
    found = np.array([shares(seconds, write, mtbf, again) for seconds in every])
    figure, panel = plt.subplots(figsize=(7.2, 3.4))
    panel.semilogx(every / 60, 100 * found[:, 1], color=COLOURS[0], label="writing")
    panel.semilogx(every / 60, 100 * found[:, 2], color=COLOURS[5], label="lost by failures")
    panel.semilogx(every / 60, 100 * (1 - found[:, 0]), color="black", label="both")
    for name, seconds, style in (
        ("Young", young(write, mtbf), "--"),
        ("Daly", daly(write, mtbf), ":"),
    ):
        panel.axvline(
            seconds / 60, color="grey", linestyle=style, label=f"{name}: {seconds / 60:.1f} min"
        )
    panel.set(
        xlabel="minutes of computing between two checkpoints", ylabel="% of the time", ylim=(0, 40)
    )
    panel.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    panel.grid(alpha=0.3)
    figure.savefig(file, dpi=105, bbox_inches="tight", format="png")
    plt.close(figure)


picture(
    draw_cadence,
    "Share of the time lost, against minutes between two checkpoints: for writing, by "
    "failures, and both",
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# The rarer the run writes, the less time writing takes, and the more time failures cost. The sum
# has a flat minimum near 71 minutes, where Young's and Daly's formulas place it.
#
# The minimum is flat: half or twice the best interval costs almost nothing. Young's and Daly's
# intervals differ by less than that.
#
# </details>
#
# ## Now on real processes
#
# Three processes save, and two go on from what they wrote.

# %% tags=["real"]
program = """
import json, sys
from pathlib import Path
import torch, minidist
from minidist import Layout, Mesh
from minidist.full.precision import MasterWeights
from minidist.full import Recipe, parallelize
from minidist.full.checkpoint import saving

comm, folder, first = minidist.init(), Path(sys.argv[1]), int(sys.argv[2])
model = torch.nn.Linear(6, 5)
parallel = parallelize(model, Mesh(comm, Layout(dp=comm.size)), Recipe(zero=1), lambda y, _: y.square().sum())
groups = [{"params": list(model.parameters())}]
optimizer = parallel.optimizer(MasterWeights, groups, optimizer=torch.optim.AdamW)
if first:
    saving.load_pieces(folder / f"step-{first:08d}", parallel, optimizer)
    parallel.stepped()
    print(f"rank {comm.rank} of {comm.size} has read its part", flush=True)
parallel.step([torch.ones(2, 6)], [None])
optimizer.step()
writer = saving.Writer(folder, comm, keep=2, every=0)
pieces = saving.pieces_to_save(parallel, optimizer)
writer.save(first + 1, pieces, {})
writer.wait()
print(f"rank {comm.rank} of {comm.size} wrote {sum(piece.extent.count for piece in pieces)} elements", flush=True)
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "save.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 3 {file} {folder}/run 0
    # !{sys.executable} -m minidist launch -n 2 {file} {folder}/run 1

# %% [markdown]
# Next: [lesson 15](../lessons/15_checkpoints/README.md), where the grader looks into your folder after every call.

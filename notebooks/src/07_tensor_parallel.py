# %% [markdown]
# # 07 · Tensor parallelism
#
# Every matrix of a layer is cut over the ranks: the first by columns, the second by rows. Then the
# result that a rank computes with the first matrix is exactly what it needs for the second, and
# only the last sum needs messages.

# %%
import sys

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import minidist
from minidist import Cluster, Trace
from minidist.draw.notebook import picture, show
from minidist.draw.recording import record
from minidist.full.adjoint import copy_to, reduce_from
from minidist.full.collectives import all_reduce

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # of ranks 0 to 3 (Okabe & Ito 2008)


def matrix(axes, x, name, rows, columns, cut):
    """Draw a matrix of `rows` x `columns`, whose columns or rows belong to the ranks, or which all
    have (or sum).
    """
    y = (5 - rows) / 2
    for rank, colour in enumerate(COLOURS):
        if cut == "columns":
            part = (x + rank * columns / 4, y), columns / 4, rows
        elif cut == "rows":
            part = (x, y + (3 - rank) * rows / 4), columns, rows / 4
        else:
            part = (x, y), columns, rows
        face = colour if cut in ("columns", "rows") else "#DDDDDD"
        axes.add_patch(Rectangle(*part, facecolor=face, edgecolor="white"))
    axes.text(x + columns / 2, y + rows + 0.25, name, ha="center", fontsize=11)
    note = {"all": "on every rank", "sum": "Σ of 4 terms"}.get(cut, f"cut by {cut}")
    axes.text(x + columns / 2, y - 0.25, note, ha="center", va="top", fontsize=8, color="#555555")


def draw_cuts(file):
    figure = Figure(figsize=(9, 2.9), layout="constrained")
    axes = figure.subplots()
    matrix(axes, 0.0, "X", 3, 2, "all")
    matrix(axes, 3.2, "A", 2, 4, "columns")
    matrix(axes, 8.4, "Y = gelu(X A)", 3, 4, "columns")
    matrix(axes, 13.6, "B", 4, 2, "rows")
    matrix(axes, 16.8, "Z = Y B", 3, 2, "sum")
    for x, sign in ((2.6, "·"), (7.8, "="), (13.0, "·"), (16.2, "=")):
        axes.text(x, 2.5, sign, ha="center", va="center", fontsize=15)
    for rank, colour in enumerate(COLOURS):
        axes.text(5.6 + 2.4 * rank, -0.75, f"■ rank {rank}", color=colour, fontsize=9)
    axes.set_xlim(-0.4, 19.2)
    axes.set_ylim(-1.1, 5.6)
    axes.set_aspect("equal")
    axes.set_axis_off()
    figure.savefig(file, dpi=110)


picture(
    draw_cuts,
    "X on every rank, times A cut by columns, is Y cut by columns, a strip for each of four "
    "ranks; times B cut by rows, it is one of four terms of Z on each rank.",
)

# %% [markdown]
# ## Who holds what
#
# **Predict:** 4 ranks, X [6, 8], A [8, 32], B [32, 8]. Which shapes do the tensors of rank 1 have?
# And is its product Y₁ B₁ a part of Z, or something else?

# %%
generator = torch.Generator().manual_seed(0)
X, A, B = (
    torch.randn(n, m, dtype=torch.float64, generator=generator)
    for n, m in ((6, 8), (8, 32), (32, 8))
)
Z = F.gelu(X @ A) @ B


def term(comm):
    Ar, Br = A.chunk(comm.size, dim=1)[comm.rank], B.chunk(comm.size, dim=0)[comm.rank]
    return tuple(Ar.shape), tuple(Br.shape), F.gelu(X @ Ar) @ Br


terms = minidist.run(term, ranks=4)
print("rank 1 holds A", terms[1][0], "and B", terms[1][1])
for rank, (_, _, part) in enumerate(terms):
    print(f"term of rank {rank}, first number: {part[0, 0]:10.6f}")
print(f"sum                       : {sum(part for *_, part in terms)[0, 0]:10.6f}")
print(f"Z of one rank             : {Z[0, 0]:10.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# The product on each rank has the *whole* shape of Z, and holds one term of every number.
#
# </details>
#
# g, an all-reduce, adds the terms of all ranks. Here it is with three ranks; a colour shows whose
# term a cell holds.


# %%
def g(comm):
    Zr = comm.watch("Z", np.full(6, comm.contribution), cells=comm.size)
    all_reduce(Zr, comm, algorithm="ring")


show(record(g, ranks=3, formulas={"bytes sent": "2 (P − 1)/P · n = 2 · 2/3 · 48 = 64"}), frames=3)

# %% [markdown]
# ## How many all-reduces are there?
#
# **Predict:** a GPT of 2 layers on 4 ranks, with embedding and head cut by words. How many
# all-reduces in forward, how many in backward? (Attention and MLP are two regions a layer. The
# embedding ends in a sum; the head begins with f; the loss adds up a few numbers for each token.)

# %%
from minidist.full import parallelize_tensor, vocabulary_parallel_cross_entropy_sum
from minidist.full.model import GPT, GPTConfig

config = GPTConfig(vocabulary=96, layers=2, hidden=32, heads=4, intermediate=64, sequence=16)
tokens = torch.randint(96, (2, 17), generator=generator)


def step(comm):
    model = GPT(config, dtype=torch.float64)
    parallelize_tensor(model, comm)
    comm.trace = trace = Trace()
    loss = (
        vocabulary_parallel_cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:], comm, 96) / 32
    )
    forward = [event.bytes for event in trace.events if event.kind == "collective"]
    loss.backward()
    both = [event.bytes for event in trace.events if event.kind == "collective"]
    return f"{loss.item():.6f}", forward, both[len(forward) :]


loss, forward, backward = minidist.run(step, ranks=4)[0]
print(f"loss {loss}, on one rank {minidist.run(step, ranks=1)[0][0]}")
print("forward, bytes of each all-reduce: ", forward)
print("backward, bytes of each all-reduce:", backward)

# %% [markdown]
# <details><summary>The answer</summary>
#
# B T D = 2 · 16 · 32 numbers of 8 bytes are 8192. Forward: embedding, four regions, and for the
# loss one and two numbers for each of the 32 tokens. Backward: the head and four regions; the loss
# needs nothing.
#
# </details>
#
# ## The loss without the logits
#
# **Predict:** 512 tokens, 4096 words, float32, 4 ranks. A rank has a quarter of the logits. How
# many bytes does it send to gather them all, and how many for the vocabulary-parallel loss?

# %%
from minidist.full.adjoint import gather_from

logits = torch.randn(512, 4096, generator=generator)
targets = torch.randint(4096, (512,), generator=generator)


def gathered(comm):
    mine = logits.chunk(comm.size, dim=1)[comm.rank]
    loss = F.cross_entropy(gather_from(mine, comm, 1, 4096), targets)
    return f"loss {loss.item():.4f}, {comm.traffic.bytes:9,} bytes sent"


def split(comm):
    mine = logits.chunk(comm.size, dim=1)[comm.rank]
    loss = vocabulary_parallel_cross_entropy_sum(mine, targets, comm, 4096) / 512
    return f"loss {loss.item():.4f}, {comm.traffic.bytes:9,} bytes sent"


print("gathered:", minidist.run(gathered, ranks=4)[0])
print("split:   ", minidist.run(split, ranks=4)[0])

# %% [markdown]
# ## How wide?
#
# **Predict:** a layer of 8192 channels, 8192 tokens in bfloat16, on modelled H100s, 8 to a node.
# Computing halves with twice the ranks. And the four all-reduces of the layer?


# %%
def sending(comm):
    # 128 MiB that are not there
    activations = torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta")
    for _ in range(4):
        all_reduce(activations, comm)
    return comm.clock()


widths = (2, 4, 8, 16, 32)
sent = [
    1000 * max(minidist.run(sending, p, cluster=Cluster.h100(nodes=-(-p // 8)))) for p in widths
]
computed = [1000 * 6 * 12 * 8192**2 * 8192 / p / 400e12 for p in widths]  # at 400 TFLOP/s
for p, one, other in zip(widths, computed, sent, strict=True):
    print(f"{p:2} ranks: {one:7.3f} ms computing, {other:7.3f} ms in all-reduces")


def draw_times(file):
    figure = Figure(figsize=(6, 2.8), layout="constrained")
    axes = figure.subplots()
    places = range(len(widths))
    axes.bar(places, computed, color=COLOURS[0], label="computing", width=0.6)
    axes.bar(places, sent, bottom=computed, color=COLOURS[1], label="in all-reduces", width=0.6)
    axes.set_xticks(places, [f"{p}" for p in widths])
    axes.set_xlabel("ranks that share a layer (8 to a node)")
    axes.set_ylabel("ms for a layer")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)


picture(
    draw_times,
    "Milliseconds for a layer on 2, 4, 8, 16 and 32 ranks, in computing and in all-reduces",
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# On 2, 4, 8, 16 and 32 ranks a layer takes 50, 27, 15, 10 and 8 ms.
#
# From 16 ranks on the all-reduces cross between nodes: a third of the time goes there, then more
# than half. Tensor parallelism stays inside a node.
#
# </details>
#
# ## Break it
#
# **Predict:** we leave out f. The forward pass is still right. Two such MLPs follow each other, x +
# MLP(x). Which gradients are wrong, those of the first MLP or those of the second?


# %%
def forgetful(comm, enter):
    a, b = A.chunk(comm.size, dim=1)[comm.rank], B.chunk(comm.size, dim=0)[comm.rank]
    weights = [w.clone().requires_grad_() for w in (a, b, a, b)]
    x = X
    for first, second in (weights[:2], weights[2:]):
        x = x + reduce_from(F.gelu(enter(x, comm) @ first) @ second, comm)
    x.square().mean().backward()
    return [w.grad.norm().item() for w in weights]


right = minidist.run(lambda comm: forgetful(comm, copy_to), ranks=2)[0]
wrong = minidist.run(lambda comm: forgetful(comm, lambda x, _: x), ranks=2)[0]
for name, one, other in zip(
    ("A of the first", "B of the first", "A of the second", "B of the second"),
    right,
    wrong,
    strict=True,
):
    print(f"gradient of {name:15}  with f {one:14.6f}   without f {other:14.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# Those of the first. The gradients of the second MLP are right: the mistake shows only *below* the
# layer that makes it. There is no error, and the model learns, but worse.
#
# </details>
#
# **Predict:** what happens with 4 heads on 3 ranks?

# %%
try:
    minidist.run(lambda comm: parallelize_tensor(GPT(config), comm), ranks=3)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Now on real processes
#
# The same step, under `mpirun`, on four processes of this machine.

# %% tags=["real"]
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import torch, minidist
from minidist.full.model import GPT, GPTConfig
from minidist.full import parallelize_tensor, vocabulary_parallel_cross_entropy_sum

comm = minidist.init()
model = GPT(GPTConfig(vocabulary=96, layers=2, hidden=32, heads=4, intermediate=64, sequence=16), dtype=torch.float64)
parallelize_tensor(model, comm)
tokens = torch.arange(34).view(2, 17)
loss = vocabulary_parallel_cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:], comm, 96) / 32
loss.backward()
held = sum(parameter.numel() for parameter in model.parameters())
print(f"rank {comm.rank} of {comm.size}: loss {loss.item():.6f}, {held} parameters held")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "tensor.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 4 {file}

# %% [markdown]
# Next: [lesson 07](../lessons/07_tensor_parallel/README.md), where you write it yourself.

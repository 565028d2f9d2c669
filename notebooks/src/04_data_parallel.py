# %% [markdown]
# # 04 · Data parallelism
#
# Backward of eight layers on four modelled GPUs, and the all-reduces of its gradients, drawn by the
# clock. Above, no rank sends before backward is over. Below, the same package code sends buckets
# while backward still runs.

# %%
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

import minidist
from minidist import Cluster, Trace
from minidist.draw.notebook import picture, show
from minidist.draw.recording import record
from minidist.full import DDP, NaiveDataParallel
from minidist.full.ddp.sampler import share

CLUSTER = Cluster.uniform(latency=10e-6, bandwidth=50e9)  # one InfiniBand port for each GPU
MIB = 1 << 20


def step(comm, wrap, layers=8, width=4096, seconds=3e-3):
    """Return when backward began, and when all gradients were reduced."""
    model = nn.Sequential(*(nn.Linear(width, width, device="meta") for _ in range(layers)))
    wrapped = wrap(model, comm, op="sum")

    def work(*_):
        with comm.span("backward of a layer"):
            comm.advance(seconds)

    for layer in model:
        layer.register_full_backward_pre_hook(work)
    loss = wrapped(torch.empty(64, width, device="meta", requires_grad=True)).sum()
    start, sent = comm.clock(), comm.traffic.messages
    loss.backward()
    wrapped.synchronize()
    return start, comm.clock(), comm.traffic.messages - sent


def buckets_of(bytes):
    return partial(DDP, bucket_bytes=bytes, first_bucket_bytes=min(bytes, MIB))


def draw(variants, file):
    figure = Figure(figsize=(8, 0.9 + 1.15 * len(variants)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(variants), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, wrap) in zip(panels, variants.items(), strict=True):
        trace = Trace()
        start, end, _ = minidist.run(
            lambda comm, wrap=wrap: step(comm, wrap), 4, cluster=CLUSTER, trace=trace
        )[0]
        for event in trace.events:
            if event.rank == 0 and event.start >= start and event.kind in ("compute", "collective"):
                row, colour = (1, "#0072B2") if event.kind == "compute" else (0, "#E69F00")
                place = (1000 * (event.start - start), 1000 * (event.end - event.start))
                panel.broken_barh(
                    [place], (row - 0.35, 0.7), color=colour, edgecolor="white", linewidth=1
                )
        panel.set_yticks([0, 1], ["all-reduce", "backward"])
        panel.set_title(f"{name}: {1000 * (end - start):.1f} ms", loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("ms of virtual time, rank 0")
    figure.savefig(file, dpi=110)


overlap = {
    "one all-reduce a parameter, after backward": NaiveDataParallel,
    "DDP, buckets of 25 MiB": buckets_of(25 * MIB),
}
picture(
    lambda file: draw(overlap, file),
    "Two timelines of rank 0. With one all-reduce a parameter after backward, eight all-reduces "
    "follow eight parts of backward and the step takes 40.8 ms. With DDP they run beside "
    "backward, and it takes 26.1 ms.",
)

# %% [markdown]
# Only the last bucket is left at the end, because it is complete only when backward is over.
#
# ## Which bucket leaves when?
#
# DDP again, event by event, on two ranks, with four layers and two layers in a bucket. The gradient of
# every weight is its rank's colour. **Predict:** which layers are in the first bucket? When it has
# been summed, which gradients do not exist yet?


# %%
class Adds(nn.Module):
    """A layer whose weights all have the same gradient."""

    def __init__(self, gradient):
        super().__init__()
        self.gradient, self.weight = gradient, nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x):
        return x + self.gradient * self.weight.sum()


def two_buckets(comm):
    layers = nn.Sequential(*(Adds(float(comm.contribution)) for _ in range(4)))
    model = DDP(layers, comm, op="sum", bucket_bytes=32, first_bucket_bytes=32, equal=True)
    for name, bucket in zip(
        ("layers 4 and 3", "layers 2 and 1"), model.reducer.buckets, strict=True
    ):
        comm.watch(name, bucket.flat, cells=2)
    model(torch.zeros(1, dtype=torch.float64)).sum().backward()


show(
    record(two_buckets, ranks=2, formulas={"bytes sent": "2 (P − 1)/P · n = 2 · 1/2 · 64 = 64"}),
    frames=4,
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# Backward reaches the last layers first, so the first bucket has layers 4 and 3. It is summed while
# layers 2 and 1 have no gradients. (A recording follows one thread of each rank, so a bucket is summed
# as soon as it is launched. Otherwise a second thread sums it beside backward, as in the picture.)
#
# </details>
#
# ## A part of the batch
#
# **Predict:** ten rows on four ranks. Which rows has each? Each rank averages the losses of its own
# rows, and then the four means are averaged: is the result the mean of all rows?

# %%
losses = np.arange(10.0)
shares = [losses[share(10, 4, rank)] for rank in range(4)]
print("rows of each rank    ", [rows.astype(int).tolist() for rows in shares])
print("the mean of all      ", f"{losses.mean():.6f}")
print("the mean of the means", f"{np.mean([rows.mean() for rows in shares]):.6f}")
print("the sum of sums / 10 ", f"{sum(rows.sum() / 10 for rows in shares):.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# No. Divide by the number of rows of all ranks, and then *sum* over the ranks: this is right for
# equal and unequal shares.
#
# </details>
#
# ## Equal steps from equal starts
#
# **Predict:** four ranks draw their parameters from different seeds, and train on their shares with
# `NaiveDataParallel`. How far are they from a serial run, which starts from rank 0's parameters?

# %%
DRAWS = torch.Generator().manual_seed(0)
INPUTS, TARGETS = (torch.randn(10, width, dtype=torch.float64, generator=DRAWS) for width in (3, 2))


def build(seed):
    model, draws = (
        nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double(),
        torch.Generator().manual_seed(seed),
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=draws)
    return model


def train(model, rank=0, ranks=1, divisor=10):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    mine = share(10, ranks, rank)
    for _ in range(20):
        optimizer.zero_grad()
        ((model(INPUTS[mine]) - TARGETS[mine]).square().sum() / divisor).backward()
        if ranks > 1:
            model.synchronize()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def parallel(comm, divisor=10):
    return train(
        NaiveDataParallel(build(seed=comm.rank), comm, op="sum"), comm.rank, comm.size, divisor
    )


serial = train(build(seed=0))
found = minidist.run(parallel, ranks=4)
apart = [
    (build(rank)[0].weight - build(0)[0].weight).detach().abs().max().item() for rank in range(4)
]
print(f"at the start the ranks' first weights differ by up to {max(apart):.6f}")
print(
    "after 20 steps all are within 1e-9 of the serial run:",
    all(torch.allclose(f, serial, rtol=1e-9) for f in found),
)
print("all ranks have the same bits:", all(torch.equal(each, found[0]) for each in found))

# %% [markdown]
# ## Break it
#
# **Predict:** each rank divides its loss by its *own* rows, and the gradients are summed. Do the
# ranks notice? What does the result look like?


# %%
def by_own_rows(comm):
    mine = share(10, comm.size, comm.rank)
    return parallel(comm, divisor=mine.stop - mine.start)


found = minidist.run(by_own_rows, ranks=4)
print("all ranks have the same bits:", all(torch.equal(each, found[0]) for each in found))
print("largest difference to the serial run:", f"{float((found[0] - serial).abs().max()):.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# There is no error. The ranks agree with each other, and the loss falls (Adam even hides the factor
# of about four). But the result is not that of the serial run.
#
# </details>
#
# The package does notice a model that leaves out a parameter on one rank:


# %%
def leaves_one_out(comm):
    model = DDP(build(seed=0), comm, op="sum")
    output = model(INPUTS) if comm.rank == 0 else model.module[2].bias
    output.sum().backward()


try:
    minidist.run(leaves_one_out, ranks=2)
except RuntimeError as error:
    print(error)

# %% [markdown]
# ## How large a bucket?
#
# **Predict:** how many messages does one backward of 200 small layers have, with one all-reduce for
# each parameter, and with buckets? And how does the time change as buckets grow from 64 KiB to one
# bucket for everything?

# %%
small = {"layers": 200, "width": 256, "seconds": 3e-5}
sizes = [1 << n for n in range(16, 27, 2)]


def measure(wrap):
    start, end, sent = minidist.run(
        lambda comm: step(comm, wrap, **small), ranks=4, cluster=CLUSTER
    )[0]
    return 1000 * (end - start), sent


naive = measure(NaiveDataParallel)
curve = [measure(buckets_of(bytes)) for bytes in sizes]
print(f"{'naive':>10}  {naive[1]:5} messages  {naive[0]:7.3f} ms")
for bytes, (milliseconds, sent) in zip(sizes, curve, strict=True):
    print(f"{bytes / MIB:6.2f} MiB  {sent:5} messages  {milliseconds:7.3f} ms")


def draw_curve(file):
    figure = Figure(figsize=(6.5, 3), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    panel.plot(
        [bytes / MIB for bytes in sizes],
        [ms for ms, _ in curve],
        "o-",
        color="#0072B2",
        label="buckets",
    )
    panel.axhline(naive[0], color="#D55E00", linestyle="--", label="one all-reduce a parameter")
    panel.axhline(6, color="#009E73", linestyle=":", label="backward alone")
    panel.set_xscale("log", base=2)
    panel.set(xlabel="bucket (MiB)", ylabel="ms of virtual time", ylim=(0, None))
    panel.legend(frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)


picture(draw_curve, "Milliseconds of a backward against the size of a bucket")

# %% [markdown]
# <details><summary>The answer</summary>
#
# Small buckets take 14 ms, buckets of 1 MiB 6, which is backward alone, and larger ones a little
# more; one all-reduce a parameter takes almost 24.
#
# </details>
#
# ## Accumulation
#
# **Predict:** four microbatches. How many bytes does a rank send if every backward reduces, and how
# many if only the last one does?


# %%
def accumulate(comm, quiet):
    model = DDP(nn.Linear(1000, 1000), comm, op="sum")
    sent = comm.traffic.bytes
    for number in range(4):
        with model.no_sync() if quiet and number < 3 else nullcontext():
            model(torch.ones(1, 1000)).sum().backward()
    return comm.traffic.bytes - sent


print("every microbatch ", minidist.run(lambda comm: accumulate(comm, quiet=False), ranks=2))
print("the last one only", minidist.run(lambda comm: accumulate(comm, quiet=True), ranks=2))

# %% [markdown]
# ## A larger batch
#
# **Predict:** rate 0.02 suits batches of 8 rows, and 0.2 suits them even better. For batches of 128
# rows the linear scaling rule says 0.32 and 3.2. Does it hold both times?


# %%
def descend(rate, batch):
    weights = torch.zeros(8, dtype=torch.float64)
    for some in torch.arange(512).split(batch):
        weights -= rate * rows[some].T @ (rows[some] @ weights - wanted[some]) / batch
    return float((rows @ weights - wanted).square().mean() / 2)


rows = torch.randn(512, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
wanted = rows.sum(1)
for rate, batch in ((0.02, 8), (0.02 * 16, 128), (0.02, 128), (0.2, 8), (0.2 * 16, 128)):
    print(f"512 rows in batches of {batch:3} at rate {rate:.2f}: loss {descend(rate, batch):.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# The rule works for 0.02, and it is needed: with the old rate, a sixteenth of the steps does not
# get far. It does not work for 0.2: a step of 3.2 is too long for this curvature. A warm-up helps
# if the loss is this steep only at the beginning of training.
#
# </details>
#
# ## Now on real processes
#
# The same training, under `mpirun`, on four processes of this machine.

# %% tags=["real"]
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import torch, minidist
from torch import nn
from minidist.full import DDP

comm = minidist.init()
torch.manual_seed(comm.rank)
model = DDP(nn.Linear(3, 1).double(), comm, op="sum")
rows = torch.arange(12, dtype=torch.float64).view(4, 3)[comm.rank].view(1, 3)
(model(rows).sum() / comm.size).backward()
print(f"rank {comm.rank} of {comm.size} has row {rows.tolist()[0]}; gradient {model.module.weight.grad.tolist()[0]}")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "ddp.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 4 {file}

# %% [markdown]
# Next: [lesson 04](../lessons/04_data_parallel/README.md), where you write it yourself.

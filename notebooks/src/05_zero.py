# %% [markdown]
# # 05 · ZeRO 1 and 2
#
# What one of four ranks holds during two training steps, under plain data parallelism and under two
# stages of ZeRO: the account of the real code, on modelled GPUs and a virtual clock. The same
# model, the same numbers, the same bytes sent.

# %%
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

import minidist
from minidist import Cluster
from minidist.draw.memory import STACK
from minidist.draw.notebook import picture, show
from minidist.draw.recording import record
from minidist.full import DDP, ZeRO1, ZeRO2, clip_by_global_norm
from minidist.full.collectives import all_gather, reduce_scatter
from minidist.full.memory.account import Account
from minidist.plan import model_states

LAYERS, WIDTH = 8, 4096
MIB = 1 << 20


def train(comm, strategy):
    """Take two steps; return what was held when, what was sent in a step, and when it ended."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(LAYERS)))
    account = Account(comm)

    def look(*_):
        comm.advance(1e-3)
        account.sample()

    for layer in model:
        layer.register_forward_hook(look)
        layer.weight.register_post_accumulate_grad_hook(look)
    wrapped = strategy(model, comm, op="sum")
    adamw = torch.optim.AdamW
    optimizer = adamw(model.parameters()) if strategy is DDP else wrapped.optimizer(adamw)
    account.watch(wrapped, optimizer)
    for _ in range(2):
        sent = comm.traffic.bytes
        loss = wrapped(torch.empty(16, WIDTH, device="meta")).sum()
        look()
        loss.backward()
        look()
        optimizer.step()
        comm.advance(2e-3)
        look()
        wrapped.zero_grad()
        look()
    return account.timeline, comm.traffic.bytes - sent, comm.clock()


CLUSTER = Cluster.uniform(latency=10e-6, bandwidth=50e9)
runs = {
    strategy.__name__: minidist.run(
        lambda comm, kind=strategy: train(comm, kind), ranks=4, cluster=CLUSTER
    )[1]
    for strategy in (DDP, ZeRO1, ZeRO2)
}


def draw(file):
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 1, sharex=True, sharey=True)
    names = ("parameters", "optimizer", "gradients")
    for panel, (title, (timeline, _, end)) in zip(panels, runs.items(), strict=True):
        changes = [*timeline, (end, timeline[-1][1])]
        moments = [1000 * (when - timeline[0][0]) for when, _ in changes]
        heights = [[held[name] / MIB for _, held in changes] for name in names]
        panel.stackplot(
            moments, heights, labels=names, colors=[STACK[name] for name in names], step="post"
        )
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_ylabel("MiB")
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("ms of virtual time, rank 1")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(file, dpi=110)


picture(
    draw,
    "MiB held over two steps, in parameters, optimizer and gradients. DDP ends at 2,048, of which "
    "half is the optimizer; under ZeRO-1 the optimizer holds a quarter of that; under ZeRO-2 "
    "gradients are nearly gone as well.",
)

# %% [markdown]
# In the first step the optimizer has no state yet: it is made when it first steps. DDP's buckets
# keep their memory from step to step. ZeRO-1 has all that and its own slice of the sum, but a
# quarter of the state. ZeRO-2 frees each bucket as soon as it is reduced. (Each peak includes one
# gradient that has just been computed and is not yet in a bucket.)
#
# **Predict:** the model has 512 MiB of parameters. How much does each of the three send in a step?

# %%
for name, (timeline, sent, _) in runs.items():
    most = max(sum(held.values()) for _, held in timeline)
    print(f"{name:6} holds at most {most / MIB:7.1f} MiB, sends {sent / MIB:.1f} MiB in a step")

# %% [markdown]
# <details><summary>The answer</summary>
#
# All three send 2 · 3/4 of 512 MiB (and the biases): an all-reduce is a reduce-scatter and an
# all-gather.
#
# </details>
#
# ## Between the two halves of an all-reduce
#
# A reduce-scatter leaves rank r with the sum of slice r; it updates slice r of the parameters; an
# all-gather returns them to all. A colour shows whose gradients a cell holds.
#
# **Predict:** at which moment does no rank know the whole new model?


# %%
def zero_step(comm):
    gradients = comm.watch("gradients", np.full(8, float(comm.contribution)), cells=comm.size)
    parameters = comm.watch("parameters", np.zeros(8), cells=comm.size)
    mine = np.array_split(parameters, comm.size)[comm.rank]
    mine += reduce_scatter(gradients, comm, algorithm="ring")  # an optimizer would do more
    all_gather(mine.copy(), comm, out=parameters, algorithm="ring")


show(record(zero_step, ranks=4, formulas={"bytes sent": "2 (P − 1)/P · n = 2 · 3/4 · 64 = 96"}))

# %% [markdown]
# ## The equation
#
# **Predict:** mixed precision, Adam, 7.5 billion parameters. From how many ranks on does it fit a
# GPU of 40 GB under each stage? And where does each curve end, however many ranks there are?


# %%
ranks = [1 << n for n in range(11)]
for stage in range(4):
    bytes = [model_states(7.5e9, many, stage).total / 1e9 for many in ranks]
    first = next((many for many, held in zip(ranks, bytes, strict=True) if held <= 40), None)
    print(
        f"stage {stage}: fits {f'from {first} ranks on' if first else 'never'}, {bytes[-1]:.6f} "
        "GB on 1024"
    )


def draw_stages(file):
    figure = Figure(figsize=(6.5, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    for stage, colour in enumerate(("#000000", "#E69F00", "#009E73", "#0072B2")):
        held = [model_states(7.5e9, many, stage).total / 1e9 for many in ranks]
        panel.plot(ranks, held, "o-", color=colour, markersize=4, label=f"stage {stage}")
    panel.axhline(40, color="#D55E00", linestyle="--", linewidth=1)
    panel.text(1024, 42, "40 GB", ha="right", color="#D55E00")
    panel.set_xscale("log", base=2)
    panel.set_xticks(ranks, [str(many) for many in ranks])
    panel.set(
        xlabel="data-parallel ranks", ylabel="GB a rank, 7.5 billion parameters", ylim=(0, 128)
    )
    panel.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.62))
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)


picture(
    draw_stages,
    "GB a rank for 7.5 billion parameters against the number of ranks, a curve for each stage",
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# Stage 0 stays at 120 GB. Stage 1 falls towards 30 and is below 40 from 16 ranks on, stage 2 falls
# towards 15, stage 3 towards zero.
#
# </details>
#
# ## The same training
#
# **Predict:** three ranks, a model of 68 numbers. How many numbers of AdamW's state does each rank
# hold, and how far is the result from a serial run?


# %%
def build():
    draws = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2), nn.Linear(2, 1, bias=False)
    ).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=draws)
    return model


ROWS = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def steps(model, optimizer, rows):
    for _ in range(10):
        optimizer.zero_grad()
        (model(rows).square().sum() / len(ROWS)).backward()
        optimizer.step()


def sharded(comm):
    model = build()
    wrapped = ZeRO2(model, comm, op="sum")
    optimizer = wrapped.optimizer(torch.optim.AdamW, lr=0.05)
    steps(wrapped, optimizer, ROWS.tensor_split(comm.size)[comm.rank])
    state = sum(
        value.numel() for held in optimizer.state.values() for value in held.values() if value.dim()
    )
    return state, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


serial = build()
steps(serial, torch.optim.AdamW(serial.parameters(), lr=0.05), ROWS)
expected = torch.cat([parameter.detach().flatten() for parameter in serial.parameters()])
found = minidist.run(sharded, ranks=3)
print("parameters:", len(expected))
print("state of each rank:", [state for state, _ in found])
print(
    "within 1e-9 of the serial run:",
    all(torch.allclose(each, expected, rtol=1e-9) for _, each in found),
)

# %% [markdown]
# ## Break it
#
# **Predict:** each rank clips by the norm of *its own* slices. What norms do they find, and what do
# they scale by?


# %%
def norms(comm):
    model = ZeRO1(build(), comm, op="sum")
    model.optimizer(torch.optim.AdamW)
    (model(ROWS.tensor_split(comm.size)[comm.rank]).square().sum() / len(ROWS)).backward()
    parts = [piece.grad.as_subclass(torch.Tensor) for piece in model.slices]
    local = torch.cat(parts).norm().item()
    return round(local, 6), round(clip_by_global_norm(model.slices, limit=0).item(), 6)


found = minidist.run(norms, ranks=3)
print("local norms:", [local for local, _ in found])
print("global norm:", [whole for _, whole in found])
print("root of the sum of squares:", f"{sum(local**2 for local, _ in found) ** 0.5:.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# Three ranks use three factors. No rank raises an error, but the model is not the one of the serial
# run.
#
# </details>
#
# Another common mistake is an optimizer over the whole parameters. The package refuses it with an
# error:


# %%
def unsharded(comm):
    model = ZeRO1(build(), comm, op="sum")
    optimizer = torch.optim.AdamW(model.parameters())
    model(ROWS).sum().backward()
    optimizer.step()


try:
    minidist.run(unsharded, ranks=2)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Now on real processes
#
# ZeRO-2 under `mpirun`, on four processes of this machine.

# %% tags=["real"]
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import torch, minidist
from torch import nn
from minidist.full import ZeRO2

comm = minidist.init()
model = ZeRO2(nn.Linear(100, 10), comm, op="sum")
optimizer = model.optimizer(torch.optim.AdamW)
model(torch.ones(1, 100)).sum().backward()
optimizer.step()
state = sum(value.numel() for held in optimizer.state.values() for value in held.values() if value.dim())
print(f"rank {comm.rank} of {comm.size} holds {state} of 2 * 1010 numbers of state")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "zero.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 4 {file}

# %% [markdown]
# Next: [lesson 05](../lessons/05_zero/README.md), where you write it yourself.

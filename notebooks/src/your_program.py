# %% [markdown]
# # Your own program, on ranks that you can see
#
# `train` is a training loop as people write it for `torchrun`: torch's own DDP, and nothing that
# knows of minidist. Here it runs on four simulated ranks of a modelled H100 machine. The picture
# shows its last two steps on the virtual clock. DDP reduces two buckets in a step: the first while
# the backward still computes, and for the second one the rank's own thread has to wait.

# %%
from dataclasses import replace

import torch
import torch.distributed as dist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch.nn.parallel import DistributedDataParallel

import minidist
from minidist import Cluster, Trace
from minidist.draw.notebook import picture
from minidist.full import DDP

WIDTH = 512


def model():
    torch.manual_seed(0)
    wide = [torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)]
    return torch.nn.Sequential(*wide)


def train(batches=12, rows=8):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel = DistributedDataParallel(model(), bucket_cap_mb=4)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    for batch in torch.randn(batches, rows, WIDTH)[rank::ranks]:
        loss = (parallel(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
    return f"{loss.item():.4f}"


trace = Trace()
machine = replace(Cluster.h100(nodes=1), flops=67e12)  # an H100 in 32 bits
running = {"torch": True, "cluster": machine, "trace": trace}
losses = minidist.run(lambda comm: train(rows=256), ranks=4, **running)
print("losses of the four ranks:", *losses)


def timeline(file):
    """Draw when each rank's bucket is under way, and when its own thread waits for it."""
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    end = max(event.end for event in trace.events)
    for kind, place, colour, label in (
        ("collective", -0.2, "#0072B2", "all-reduce"),
        ("wait", 0.2, "#D55E00", "the rank's thread waits"),
    ):
        spans = [event for event in trace.events if event.kind == kind and event.bytes != 8]
        starts = [1e6 * event.start for event in spans]
        widths = [1e6 * (event.end - event.start) for event in spans]
        rows = [event.rank + place for event in spans]
        axes.barh(rows, widths, 0.38, starts, color=colour, edgecolor="white", label=label)
    axes.set(xlabel="virtual time (microseconds)", ylabel="rank", yticks=range(4))
    axes.set_xlim(1e6 * end - 280, 1e6 * end)
    axes.invert_yaxis()
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    figure.savefig(file, dpi=120)


picture(
    timeline,
    "The last two steps of four ranks. In each step two all-reduces follow each other. A rank's own "
    "thread waits during the last part of the first and all of the second.",
)

# %% [markdown]
# ## A bug
#
# With 10 batches for 4 ranks, ranks 0 and 1 take a third one, and ranks 2 and 3 do not.
# **Predict:** what happens under `torchrun`? And what will be said here?

# %%
try:
    minidist.run(lambda comm: train(batches=10), ranks=4, torch=True)
except minidist.DeadlockError as error:
    print(error)

# %% [markdown]
# <details><summary>The answer</summary>
#
# Under `torchrun` ranks 0 and 1 wait in `loss.backward()` for an all-reduce to which nobody comes,
# until torch's limit ends the job after half an hour (gloo), or ten minutes (NCCL). Nothing says
# who is missing. Simulated ranks *prove* that nobody can go on, at once: who waits, at which line,
# and which rank has finished without coming.
#
# </details>
#
# ## What it sends
#
# Rows that do not fill a batch for every rank are left out, and all is well. **Predict:** the model
# has n parameters of 4 bytes. How many bytes does a rank send in a step, and does minidist's own DDP
# send more or fewer?


# %%
def one_step(comm, parallel):
    sent = comm.traffic.bytes
    parallel(torch.randn(8, WIDTH)).square().mean().backward()
    return comm.traffic.bytes - sent


def torchs(comm):
    dist.init_process_group("gloo")
    return one_step(comm, DistributedDataParallel(model(), bucket_cap_mb=4))


n = sum(parameter.numel() for parameter in model().parameters())
print(f"2 (P - 1)/P x 4 n = {2 * 3 / 4 * 4 * n:,.0f}")
print("torch's DDP        ", minidist.run(torchs, ranks=4, torch=True)[0])
ours = minidist.run(lambda comm: one_step(comm, DDP(model(), comm, op="mean")), ranks=4)
print("minidist's DDP     ", ours[0])

# %% [markdown]
# ## On 64 modelled H100
#
# The same `train` on eight machines of eight GPUs. Products take time on the virtual clock, at the
# peak of an H100 in 16 bits. **Predict:** the model has 2 million parameters, an H100 sends 50 GB/s to another
# machine. How long does a step take with 8 ranks on one machine, and how long with 64 on eight?

# %%
for nodes in (1, 8):
    ranks = 8 * nodes

    def timed(comm, ranks=ranks):
        train(batches=ranks)  # DDP's preparations, and one step
        before = comm.clock()
        train(batches=3 * ranks)
        return comm.clock() - before

    clocks = minidist.run(timed, ranks=ranks, torch=True, cluster=Cluster.h100(nodes=nodes))
    print(f"{ranks:2} ranks: {1e6 * clocks[0]:,.0f} microseconds for three steps")

# %% [markdown]
# <details><summary>The answer</summary>
#
# The products of 8 rows take well under a microsecond. All the rest is the all-reduce: a hundred
# messages one after the other with 64 ranks, each of which takes 10 microseconds to another
# machine. So small a model has nothing to gain from 64 GPUs.
#
# </details>
#
# ## Break it
#
# One rank asks for the largest value, the others for the sum. torch's own backends would return
# some numbers.


# %%
def one_of_them_is_wrong():
    dist.init_process_group("gloo")
    loss = torch.ones(1)
    dist.all_reduce(loss, dist.ReduceOp.MAX if dist.get_rank() == 2 else dist.ReduceOp.SUM)


try:
    minidist.run(lambda comm: one_of_them_is_wrong(), ranks=4, torch=True)
except Exception as error:
    print(type(error).__name__, error, sep=": ")

# %% [markdown]
# ## Now on real processes
#
# A script, unchanged, on four processes of MPI: `launch` tells them what `torchrun` would.

# %% tags=["real"]
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
mine = torch.full((3,), float(os.environ["LOCAL_RANK"]))
dist.all_reduce(mine)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, over {dist.get_backend()}: {mine.tolist()}")
dist.destroy_process_group()
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "script.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 4 {file}

# %% [markdown]
# Next: `docs/your-program.md`, in minidist's repository, with what runs, what does not, and why.

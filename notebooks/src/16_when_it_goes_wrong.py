# %% [markdown]
# # 16 · When it goes wrong
#
# Four ranks train, and three of them wait most of the time. Which rank is at fault? The slow rank
# is the one with hardly any grey in its row: it does not have to wait for the others.

# %%
import hashlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import minidist
from minidist import Cluster, Trace
from minidist.draw.memory import draw_memory
from minidist.draw.notebook import picture, show
from minidist.draw.perfetto import write
from minidist.draw.recording import record
from minidist.draw.table import time_table
from minidist.full.collectives import all_reduce, broadcast
from minidist.full.memory.account import Account


def three_steps(comm, slow=2):
    for _ in range(3):
        with comm.span("forward and backward"):
            comm.advance(0.015 if comm.rank == slow else 0.010)
        all_reduce(torch.empty(2**26, device="meta"), comm, algorithm="ring")


def traced(program):
    trace = Trace()
    minidist.run(program, ranks=4, cluster=Cluster.h100(nodes=1), trace=trace)
    return trace


def timeline(trace, file):
    """Draw when each rank computes and when it is in a collective."""
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for kind, colour, label in (
        ("compute", "#0072B2", "computes"),
        ("collective", "#BBBBBB", "in the all-reduce"),
    ):
        spans = [event for event in trace.events if event.kind == kind]
        widths = [1000 * (event.end - event.start) for event in spans]
        starts = [1000 * event.start for event in spans]
        axes.barh(
            [e.rank for e in spans],
            widths,
            0.7,
            starts,
            color=colour,
            edgecolor="white",
            label=label,
        )
    axes.set(xlabel="virtual time (ms)", ylabel="rank", yticks=range(4))
    axes.invert_yaxis()
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    figure.savefig(file, dpi=120)


slow_run = traced(three_steps)
picture(
    lambda file: timeline(slow_run, file),
    "Three steps of four ranks. Ranks 0, 1 and 3 compute 10 ms and then stand in the all-reduce "
    "for 6; rank 2 computes 15 ms and stands there for one.",
)

# %% [markdown]
# ## It is slow: the table
#
# **Predict:** rank 2 computes 15 ms a step, the others 10 ms. Which rank is said to *communicate*
# most? And how long would the run take if rank 2 were as fast as the others?

# %%
as_fast = traced(lambda comm: three_steps(comm, slow=None))
print(time_table(slow_run.events), time_table(as_fast.events).partition("\n\n")[0], sep="\n\n")

# %% [markdown]
# <details><summary>The answer</summary>
#
# The ranks that communicate most are the healthy ones, and every rank takes as long as the slowest.
# Nothing is wrong with the network: in the second run it takes as little time as rank 2 spends in
# it here.
#
# </details>
#
# ## The same for Perfetto
#
# `write` writes the events for https://ui.perfetto.dev: drop the file there.
#
# **Predict:** what will be drawn for each rank, besides the bars above?

# %%
with TemporaryDirectory() as folder:
    file = Path(folder, "step.json")
    write(slow_run.events, file)
    entries = json.loads(file.read_text())["traceEvents"]

rows = {
    (entry["pid"], entry["args"]["name"]) for entry in entries if entry["name"] == "thread_name"
}
rows_of_2 = sorted(name for rank, name in rows if rank == 2)
arrows = sum(entry["ph"] == "s" for entry in entries)
bar = next(entry for entry in entries if entry["ph"] == "X" and entry["pid"] == 2)
print(f"rows of rank 2: {rows_of_2}\narrows: {arrows}\none bar: {bar}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# A row for computing, one for collectives, rows for messages; an arrow from each send to its
# receive (3 steps, 4 ranks, 6 messages each). Follow the arrows back from a bar that waits: they
# lead to rank 2.
#
# </details>
#
# ## Break it: it stands still
#
# **Predict:** rank 1 leaves a ring one message early. Which rank is named in the last line?


# %%
def leaves_early(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    buffer = comm.watch("buffer", np.full(2, comm.contribution))
    for _ in range(1 if comm.rank == 1 else 2):
        incoming = np.empty_like(buffer)
        comm.exchange(buffer, right, incoming, left)


stuck = record(leaves_early, ranks=3)
print(stuck.deadlock)
show(stuck, frames=2)

# %% [markdown]
# <details><summary>The answer</summary>
#
# The rank at fault has no line of its own, because it does not wait. The chain ends at it.
#
# </details>
#
# ## Break it: other calls
#
# **Predict:** one rank calls `broadcast` where the others call `all_reduce`. What does the error
# say without debug mode, and what with it? And if the calls are the same, but two buffers of equal
# size change places?


# %%
def another_call(comm):
    broadcast(np.ones(4), comm) if comm.rank == 1 else all_reduce(np.ones(4), comm)


def another_order(comm):
    weight, bias = np.full(4, 1.0), np.full(4, 10.0)
    for gradient in (bias, weight) if comm.rank == 1 else (weight, bias):
        all_reduce(gradient, comm)
    return int(weight[0]), int(bias[0])


def outcome(program, debug):
    try:
        return str(minidist.run(program, ranks=3, debug=debug))
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[-1].strip()}".replace(
            "; ", ";\n    "
        )


said = [
    f"{program.__name__}, debug={debug}:\n    {outcome(program, debug)}"
    for program in (another_call, another_order)
    for debug in (False, True)
]
print("\n".join(said))

# %% [markdown]
# <details><summary>The answer</summary>
#
# The last program raises no error in either mode, because all ranks describe their calls with the
# same words. Only the numbers are wrong: they should be 3 and 30.
#
# </details>
#
# ## It learns something else
#
# **Predict:** in step 6 one bit of one weight of rank 2 flips. From which step on do the digests
# differ? Does the loss of rank 0 show it?


# %%
def train(comm):
    rows = np.random.default_rng(comm.rank).normal(size=(32, 4))
    weights, history = np.zeros(4), []
    for step in range(1, 11):
        error = rows @ weights - rows.sum(1)
        gradient = rows.T @ error / len(rows)
        all_reduce(gradient, comm, op="mean")
        weights -= 0.1 * gradient
        if step == 6 and comm.rank == 2:
            weights.view(np.uint64)[1] ^= np.uint64(1 << 51)  # the highest bit of the fraction
        digests = comm.all_gather_object(hashlib.sha256(weights.tobytes()).digest()[:8])
        odd = [rank for rank, digest in enumerate(digests) if digests.count(digest) == 1]
        history.append((step, (error**2).mean(), odd))
    return history


history = minidist.run(train, ranks=4)[0]
print(
    "\n".join(
        f"step {step:2}  loss of rank 0 {loss:.6f}  odd ranks {odd}" for step, loss, odd in history
    )
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# The loss of rank 0 falls on. The digests differ from the step of the fault on, and for ever, since
# one average gradient moves all ranks alike.
#
# </details>
#
# NaN (not a number) is the opposite: after an all-reduce all ranks have it. **Predict:** what do
# the ranks see before the all-reduce, and after?


# %%
def with_a_hole(comm):
    gradient = np.ones(4)
    gradient[3] = np.nan if comm.rank == 2 else 1.0
    before = bool(np.isfinite(gradient).all())
    all_reduce(gradient, comm)
    return before, bool(np.isfinite(gradient).all())


print("finite before and after, by rank:", minidist.run(with_a_hole, ranks=4))

# %% [markdown]
# ## It runs out of memory
#
# **Predict:** rank 1 also notes the loss of other rows after each step, to plot it later, and
# forgets `torch.no_grad()`. Which category grows, and how does that look?


# %%
def steps_with_a_leak(comm):
    generator = torch.Generator().manual_seed(0)
    rows, more_rows = torch.randn(2, 256, 64, generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    account, validation = Account(comm), []
    account.watch(model)
    with account.recording():
        for _ in range(4):
            comm.advance(0.001)
            loss = model(rows).square().mean()
            comm.advance(0.001)
            loss.backward()
            if comm.rank == 1:
                # and its graph: no_grad() is missing
                validation.append(model(more_rows).square().mean())
            comm.advance(0.001)
            del loss
            account.sample()
    return account.timeline, account.peak


accounts = minidist.run(steps_with_a_leak, ranks=2, cluster=Cluster.h100(nodes=1))
print("\n".join(f"rank {rank}: {peak}" for rank, (_, peak) in enumerate(accounts)))
picture(
    lambda file: draw_memory([timeline for timeline, _ in accounts], file),
    "KiB held by two ranks over four steps, by category",
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# Rank 0's activations come and go, with a peak of 321 KiB. Rank 1's grow by the same amount in each
# step, up to 705.
#
# The parameters are the same on both ranks. The activations of rank 1 grow by the same amount in
# each step: the curve of a leak is a staircase.
#
# </details>
#
# ## It starts slowly
#
# **Predict:** 64 GPUs, rank 0 has read 1 GiB of weights. How much longer does it take if rank 0
# sends them to every other rank itself?


# %%
def receive_weights(comm, algorithm):
    weights = torch.empty(2**28, device="meta")  # 1 GiB that are not there
    broadcast(weights, comm, algorithm=algorithm)
    return comm.clock()


def slowest(algorithm):
    return max(
        minidist.run(
            lambda comm: receive_weights(comm, algorithm), ranks=64, cluster=Cluster.h100(nodes=8)
        )
    )


print(f"central {slowest('central'):.3f} s, tree {slowest('tree'):.3f} s")

# %% [markdown]
# ## Now on real processes
#
# Three processes run on this machine, and rank 2 leaves early. The watchdog of a waiting rank asks
# the others, learns that rank 2 has finished, and ends the job. Then `doctor` says what works on
# this machine.

# %% tags=["real"]
program = """
import numpy as np, minidist
from minidist.full.collectives import all_reduce

comm = minidist.init(limit=20)
for _ in range(3 if comm.rank == 2 else 4):
    all_reduce(np.ones(2), comm)
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "hang.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 3 {file}
# !{sys.executable} -m minidist doctor | sed '/^$/,$d; s/, whose mpirun.*//'

# %% [markdown]
# Next: [lesson 16](../lessons/16_when_it_goes_wrong/README.md), where you write such tools yourself.

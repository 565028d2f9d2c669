# %% [markdown]
# # 10 · Zero bubble
#
# One training step of four ranks, three times: 1F1B, interleaved 1F1B with two stages a rank, and
# ZB-H1, which cuts the backward in two. Grey is waiting.

# %%
import sys
from itertools import accumulate

import matplotlib.pyplot as plt
import numpy as np
import torch

from minidist import Cluster
from minidist.draw.notebook import picture, schedules, show
from minidist.draw.pipeline import draw_text
from minidist.draw.recording import record
from minidist.full.pipeline import (
    check,
    peak_activations,
    peak_deferred,
    plan,
    read_plan,
    simulate,
)

for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)):
    shorter = 1 / chunks  # a stage of half the layers takes half the time
    costs = {"forward": shorter, "backward": 2 * shorter, "input": shorter, "weight": shorter}
    schedules(simulate(plan(name, 4, 8, chunks), **costs))

# %% [markdown]
# Each is drawn to its own scale: the steps take 33, 28.5 and 27 forwards of a rank. Dark and light
# are a rank's first and second stage; purple is the gradient of the inputs (I), orange that of the
# weights (W).
#
# ## What does interleaving cost?
#
# **Predict:** take four ranks and eight microbatches. With 1, 2 and 4 stages on each rank, how do
# the bubble, the number of messages, and the memory of rank 0 change?

# %%
for chunks in (1, 2, 4):
    schedule = plan("interleaved", 4, 8, chunks)
    messages, held = 2 * 8 * (4 * chunks - 1), peak_activations(schedule)[0] / chunks
    print(
        f"v = {chunks}: bubble {simulate(schedule).bubble:.6f}, {messages:3} messages, rank 0 "
        f"holds {held:.6f}"
    )

# %% [markdown]
# ## When messages take time
#
# **Predict:** a stage's message takes the same time however few layers a stage has. Let it take 0,
# 0.1, ... of a whole rank's forward. Do four stages a rank stay the fastest?


# %%
def draw_lengths(file):
    """Draw the length of the step against the time of a message."""
    figure, panel = plt.subplots(figsize=(6.5, 3), layout="constrained")
    for chunks, colour, line in ((1, "#0072B2", "-"), (2, "#009E73", "--"), (4, "#D55E00", "-.")):
        latencies = np.linspace(0, 0.5, 11)
        schedule = plan("interleaved", 4, 8, chunks)
        lengths = [
            simulate(schedule, 1 / chunks, 2 / chunks, latency=latency).length
            for latency in latencies
        ]
        panel.plot(latencies, lengths, color=colour, linestyle=line, label=f"v = {chunks}")
    panel.set(
        xlabel="time of a message (a rank's forward = 1)",
        ylabel="length of the step",
        ylim=(20, 46),
    )
    panel.legend(frameon=False)
    figure.savefig(file, dpi=100)
    plt.close(figure)


picture(
    draw_lengths, "Length of the step against the time of a message, for 1, 2 and 4 stages a rank"
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# The lengths start at 33, 28.5 and 26.25 for 1, 2 and 4 stages a rank; the more stages, the steeper
# they grow. At half a forward, four stages are the slowest.
#
# The more stages, the more often a microbatch waits for a message on its way around the ranks.
#
# </details>
#
# ## A backward in two halves
#
# **Predict:** of a linear layer y = x Wᵀ, autograd is asked for the gradient of x alone, and later
# for W from what was kept: x and g. Are these exactly the gradients of a whole backward?

# %%
generator = torch.Generator().manual_seed(0)
x, weight, g = (torch.randn(3, 3, dtype=torch.float64, generator=generator) for _ in range(3))
x.requires_grad_()
weight.requires_grad_()
(x @ weight.T).backward(g)
for_inputs, for_weights = g @ weight.detach(), g.T @ x.detach()
print(
    "I equals autograd:",
    torch.equal(for_inputs, x.grad),
    " W equals autograd:",
    torch.equal(for_weights, weight.grad),
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# Yes. They are two products that do not depend on each other, so W can wait.
#
# </details>
#
# ## Where does W go?
#
# **Predict:** under 1F1B every rank idles (p − 1)(F + B) = 9 for four ranks, F = 1 and B = 2. If a
# rank computes W where it would idle, how much idle time is left? And what does the rank have to
# hold for this?

# %%
for name in ("1f1b", "zb-h1"):
    schedule = plan(name, 4, 8)
    idle = ", ".join(f"{each:g}" for each in simulate(schedule).idle)
    print(
        f"{name:6} idle {idle}; F done: {peak_activations(schedule)}; W owed: "
        f"{peak_deferred(schedule)}"
    )
print(draw_text(simulate(plan("zb-h1", 4, 5))))


# %%
def held(row):
    """Return how many microbatches a rank holds, after each action: F done and W not."""
    return list(accumulate({"F": 1, "W": -1}.get(action.kind, 0) for action in row))


def draw_held(file):
    """Draw what each rank of ZB-H1 holds over time, in two parts."""
    schedule = plan("zb-h1", 4, 8)
    timeline = simulate(schedule)
    figure, panels = plt.subplots(1, 4, figsize=(10, 2.4), sharey=True, layout="constrained")
    for rank, panel in enumerate(panels):
        times, row = [0.0, *timeline.end[rank]], schedule.actions[rank]
        waiting = [0, *accumulate({"F": 1, "I": -1}.get(action.kind, 0) for action in row)]
        panel.stackplot(
            times,
            waiting,
            np.subtract([0, *held(row)], waiting),
            step="post",
            colors=("#0072B2", "#E69F00"),
            labels=("for I and W", "for W alone"),
        )
        panel.set(
            title=f"rank {rank}", xlabel="time (forwards)", ylim=(0, 6), yticks=range(0, 7, 2)
        )
    panels[0].set_ylabel("microbatches held")
    panels[0].legend(frameon=False, loc="upper right", fontsize=8)
    figure.savefig(file, dpi=100)
    plt.close(figure)


picture(
    draw_held,
    "Microbatches held over time by each of four ranks, at most four. On rank 0 they wait for I "
    "and W, from rank to rank more of them for W alone, on rank 3 nearly all.",
)

# %% [markdown]
# The last rank holds the fewest activations and delays the most W. Both together are p microbatches
# on every rank.
#
# ## The messages of ZB-H1
#
# Three ranks carry out the package's plan with real messages, on a virtual clock where F, I and W take
# a microsecond each. A rank adds its colour to what passes through it. **Predict:** which of the three
# kinds of gradients and outputs is never sent? When does the last rank compute its first W?


# %%
def zero_bubble(comm):
    left, right = comm.rank - 1, comm.rank + 1
    outputs = comm.watch("outputs", np.zeros(3), cells=3)
    for_inputs = comm.watch("gradients of inputs", np.zeros(3), cells=3)
    for_weights = comm.watch("gradients of weights", np.zeros(3), cells=3)
    # the buffer, where its numbers come from, and where they go
    ways = {"F": (outputs, left, right), "I": (for_inputs, right, left), "W": (for_weights, -1, -1)}
    sending = []
    for action in plan("zb-h1", comm.size, 3).actions[comm.rank]:
        buffer, source, to = ways[action.kind]
        cell = buffer[action.microbatch : action.microbatch + 1]
        if 0 <= source < comm.size:
            comm.recv(cell, source)
        with comm.span(str(action)):
            comm.advance(1e-6)
        cell += comm.contribution
        if 0 <= to < comm.size:
            sending.append(comm.isend(cell, to))
    for request in sending:
        request.wait()


idle, of = (f"{sum(simulate(plan(name, 3, 3)).idle) / 3:g}" for name in ("zb-h1", "1f1b"))
formula = f"{idle} of 11 µs idle; under 1F1B {of} of 15"
show(
    record(
        zero_bubble,
        ranks=3,
        cluster=Cluster.uniform(latency=0, bandwidth=1e15),
        formulas={"bubble": formula},
    )
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# The gradients of weights stay where they are: nobody waits for them. The last rank computes W only
# after its last I: as long as there is an I, the rank before it waits for one.
#
# </details>
#
# ## Two stages in a V
#
# **Predict:** stages 0 to 7 go down ranks 0 to 3 and up again, so rank 0 has stages 0 and 7. Which
# rank gets the gradient of the loss first, and which ranks have to wait?

# %%
schedule = plan("zb-v", 4, 8)
schedules(simulate(schedule, forward=0.5, input=0.5, weight=0.5))
print("stages held:", peak_activations(schedule), "each half of a rank's layers")

# %% [markdown]
# <details><summary>The answer</summary>
#
# Rank 0 gets it first: it has the last stage. No rank waits between its first and its last action.
#
# </details>
#
# ## Break it
#
# **Predict:** rank 1 takes its two stages backward in the order in which it took them forward. What
# happens?

# %%
text = plan("interleaved", 2, 2, 2).text()
print(text)
try:
    check(read_plan(text.replace("3B0 3F1 3B1 1B0 1B1", "1B0 3F1 1B1 3B0 3B1")))
except ValueError as error:
    print(error)

# %% [markdown]
# <details><summary>The answer</summary>
#
# Rank 0 waits for rank 1, and rank 1 waits for rank 0. The package finds this in the plan, before
# anything is sent.
#
# </details>
#
# ## Now on real processes
#
# A model of eight layers on four processes of this machine, under each of the schedules: the loss
# and the gradients are the serial ones.

# %% tags=["real"]
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import torch, minidist
from torch import nn
from minidist.full.pipeline.executor import Pipeline
from minidist.full.pipeline import plan, with_communication

comm = minidist.init()
torch.manual_seed(0)
x, target = torch.randn(2, 16, 8, dtype=torch.float64)
loss = lambda y, t: ((y - t) ** 2).sum() / x.numel()
for name, chunks in (("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)):
    serial = nn.Sequential(*(nn.Linear(8, 8, dtype=torch.float64) for _ in range(8)))
    loss(serial(x), target).backward()
    layers = [nn.Linear(8, 8, dtype=torch.float64) for _ in range(8)]
    for copy, layer in zip(layers, serial):
        copy.load_state_dict(layer.state_dict())
    schedule = with_communication(plan(name, 4, 8, chunks))
    each = 8 // schedule.stages
    stages = {s: nn.Sequential(*layers[each * s : each * s + each]) for s in schedule.stages_of(comm.rank)}
    Pipeline(stages, comm, schedule, loss, torch.empty_like).step(x.chunk(8), target.chunk(8))
    mine = [k for k, layer in enumerate(layers) if layer.weight.grad is not None]
    equal = all(torch.allclose(layers[k].weight.grad, serial[k].weight.grad, rtol=1e-9) for k in mine)
    print(f"{name}: layers {mine}, gradients are the serial ones: {equal}")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "pipeline.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 4 {file}

# %% [markdown]
# Next: [lesson 10](../lessons/10_zero_bubble/README.md), where you write them yourself.

# %% [markdown]
# # 22 · Slow wires, old weights
#
# Three ranks have gradients of six elements. Each sends its two largest to both others, as places and
# values. Step through it: rank r has something at the places r and r + 1, so most sums have two parts.

# %%
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy as np
import torch

import minidist
from minidist.draw.notebook import picture, show
from minidist.draw.recording import record
from minidist.full.collectives import all_reduce
from minidist.further.stale.plans import flushed, most_versions, never_flushed, newest, one_behind
from minidist.slow_wires import DiLoCo, sparse_all_reduce, train_delayed

COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]


def two_of_six(comm):
    """Send two elements, and get the sum."""
    gradient = torch.zeros(6, dtype=torch.float64)
    gradient[comm.rank : comm.rank + 2] = float(comm.contribution)
    gradient = comm.watch("gradient", gradient, cells=6)
    kept = comm.watch("kept", torch.zeros(6, dtype=torch.float64), cells=6)
    sparse_all_reduce(gradient, kept, 2, comm)


show(
    record(two_of_six, ranks=3, formulas={"bytes sent": "(P − 1) k (4 + 8) = 2 · 2 · 12 = 48"}),
    frames=4,
)

# %% [markdown]
# An all-reduce of these six elements would send 2 · 2/3 · 48 = 64 bytes. With a gradient of a billion
# elements, and one in a hundred, the difference is large.
#
# ## What is kept
#
# Four ranks fit weights to 20 inputs, whose variances differ up to a hundredfold. Each rank has rows of
# its own; the losses are those of rank 0's rows. **Predict:** each sends one element of 20. Where does
# the loss end without anything kept, and where with error feedback?

# %%
SCALES = torch.logspace(0, -2, 20, dtype=torch.float64)


def fit(comm, way):
    """Take 3,000 steps of SGD; return the losses and the bytes sent."""
    draws = torch.Generator().manual_seed(comm.rank)
    rows = torch.randn(40, 20, generator=draws, dtype=torch.float64) * SCALES.sqrt()
    noise = torch.randn(40, generator=draws, dtype=torch.float64)
    goals = rows @ (1 / SCALES.sqrt()) + 0.1 * noise
    weight, kept, losses = torch.zeros_like(SCALES), torch.zeros_like(SCALES), []
    for _ in range(3000):
        off = rows @ weight - goals
        losses.append(off.square().mean().item())
        gradient = rows.T @ off / len(rows) / comm.size
        if way == "all elements":
            all_reduce(gradient, comm)
        else:
            sparse_all_reduce(gradient, kept, 1, comm)
        if way == "nothing kept":
            kept.zero_()
        weight -= 0.2 * gradient
    return losses, comm.traffic.bytes


WAYS = ("all elements", "error feedback", "nothing kept")
curves = {way: minidist.run(partial(fit, way=way), ranks=4)[0] for way in WAYS}
for way, (losses, sent) in curves.items():
    print(f"{way:15} loss {losses[0]:.6f} -> {losses[-1]:.6f}, {sent:9,} bytes")


# %%
def draw_losses(file):
    """Draw the losses of the three ways."""
    figure, panel = plt.subplots(figsize=(7.2, 3.0))
    for colour, (way, (losses, _)) in zip(COLOURS, curves.items(), strict=False):
        panel.loglog(np.arange(1, 3001), losses, color=colour, label=way)
    panel.set(xlabel="steps", ylabel="loss")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(file, dpi=100, bbox_inches="tight", format="png")
    plt.close(figure)


picture(
    draw_losses,
    "Three curves of the loss against steps: with error feedback the loss follows that of all "
    "elements; with nothing kept it stays far above.",
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# With error feedback the loss is nearly that of all elements, for a part of the bytes. With nothing kept
# it stops far above. Each rank's largest element is where its *own* rows still want to go, and there
# the ranks cancel each other. What they have in common is smaller, and is never sent.
#
# </details>
#
# ## Sites that meet now and then
#
# Two sites want to go to different places. Each takes steps alone; after every ten they meet, and take
# an outer step together. **Predict:** draw the paths of both sites before you look.


# %%
def paths(comm, every, lr, momentum, steps=80, up=False):
    """Return where this site is after each step."""
    lowest, curvature = (((4.0, 0.0), (1.0, 0.3)), ((4.0, 4.0), (0.3, 1.0)))[comm.rank]
    goal = torch.tensor(lowest, dtype=torch.float64)
    x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    outer, seen = DiLoCo([x], comm, every, lr, momentum), [(0.0, 0.0)]
    outer.outer.param_groups[0]["maximize"] = up
    for _ in range(steps):
        with torch.no_grad():
            x -= 0.1 * torch.tensor(curvature, dtype=torch.float64) * (x - goal)
        seen.append(tuple(x.tolist()))
        outer.stepped()
        if seen[-1] != tuple(x.tolist()):
            seen.append(tuple(x.tolist()))
    return seen


SETTINGS = {"local SGD": (10, 1.0, 0.0), "DiLoCo": (10, 0.7, 0.6), "every step": (1, 1.0, 0.0)}
walked = {
    name: minidist.run(partial(paths, every=every, lr=lr, momentum=momentum), ranks=2)
    for name, (every, lr, momentum) in SETTINGS.items()
}


def draw_paths(file):
    """Draw the paths of both sites."""
    figure, panels = plt.subplots(1, 3, figsize=(9.6, 3.0), sharex=True, sharey=True)
    for panel, (name, sites) in zip(panels, walked.items(), strict=True):
        for site, (colour, seen) in enumerate(zip(COLOURS, sites, strict=False)):
            panel.plot(*zip(*seen, strict=True), color=colour, marker=".", label=f"site {site}")
        panel.set(title=name)
        panel.grid(alpha=0.3)
    panels[-1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(file, dpi=90, bbox_inches="tight", format="png")
    plt.close(figure)


picture(
    draw_paths,
    "Paths of two sites in the plane. They part for ten steps and meet again, like the teeth of a "
    "saw. With DiLoCo the teeth lie farther apart. With a meeting in every step the teeth are "
    "tiny, and the paths lie on each other.",
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# They part, meet, and part again. With momentum the meetings lie farther apart than the sites have
# gone: the outer optimizer trusts a direction in which they have gone several times.
#
# </details>
#
# ## Break it: the other sign
#
# Somebody computes after minus before. The outer step then goes up, as with the rate −0.7.
# **Predict:** the sites are 5.7 away from (4, 4) at first. How far away are they after eight meetings?

# %%
for name, up in (("before minus after", False), ("after minus before", True)):
    seen = minidist.run(partial(paths, every=10, lr=0.7, momentum=0.0, up=up), ranks=2)[0]
    print(f"{name}: {np.hypot(seen[-1][0] - 4, seen[-1][1] - 4):.6f} from (4, 4)")

# %% [markdown]
# <details><summary>The answer</summary>
#
# With the other sign they are farther away than they were at first. The inner optimizer goes down in
# every step; the outer step takes all of that back, and more. The loss of a run that does this falls
# for H steps and jumps up, again and again.
#
# </details>
#
# ## A pipeline that never stops
#
# Here are the plans of three stages: with a flush, without one (PipeDream), and with an update for each
# batch of three (2BW). The number behind an F is the version of the weights that it uses.
# **Predict:** which version has the last forward of each stage?


# %%
def rows_of(plan, versions):
    """Return a line for each stage: forwards with their versions, backwards, updates."""
    for stage, row in enumerate(plan.actions):
        words = []
        for action in row:
            version = f"v{versions[stage][action.microbatch]}" if action.kind == "F" else ""
            words.append("U" if action.kind == "U" else f"{action.kind}{version}")
        yield " ".join(words)


PLANS = (
    ("flush", flushed(3, batches=2, batch=3), newest),
    ("PipeDream", never_flushed(3, batches=5), newest),
    ("2BW", never_flushed(3, batches=3, batch=3), one_behind),
)
for name, plan, choose in PLANS:
    versions = choose(plan)
    print(f"{name}: versions kept by each stage {most_versions(plan, versions)}")
    print(*rows_of(plan, versions), sep="\n")

# %% [markdown]
# <details><summary>The answer</summary>
#
# Without a flush the first stage is two updates behind: its last forward uses version 2, that of the
# last stage version 4. In 2BW all stages use the same version, one update behind, and each keeps two.
# With a flush nobody keeps an old version, and everybody waits.
#
# </details>
#
# ## Break it: a backward with the newest weights
#
# A stage computes y = w₂ tanh(w₁ x). Between its forward and its backward somebody has updated w₂ from
# 0.5 to 2. **Predict:** what is the slope of y along w₁, with the forward's weights, and what comes out
# if the backward uses the new w₂?

# %%
x, w1, old, new = 0.7, 1.2, 0.5, 2.0
slope = 1 - np.tanh(w1 * x) ** 2
nearby = old * (np.tanh((w1 + 1e-6) * x) - np.tanh((w1 - 1e-6) * x)) / 2e-6
print(f"measured, with the forward's weights: {nearby:.6f}")
print(f"backward with the forward's weights:  {old * slope * x:.6f}")
print(f"backward with the newest weights:     {new * slope * x:.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# Four times too large, because w₂ has grown fourfold. With more layers each factor is off by its own
# amount, so the direction is wrong as well. That is why a stage keeps old versions.
#
# </details>
#
# ## What old weights allow
#
# A small network learns a sine with gradients that are d − 1 updates old. **Predict:** which curve turns
# up first when the learning rate grows?

# %%
POINTS = torch.linspace(-2, 2, 32, dtype=torch.float64)[:, None]


def loss_at(rate, delay):
    """Return the loss after 150 steps, at most 10."""
    draws = torch.Generator().manual_seed(3)
    net = torch.nn.Sequential(
        torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    ).double()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=draws)
    sgd = torch.optim.SGD(net.parameters(), lr=rate)
    losses = train_delayed(
        [net],
        [delay],
        range(150),
        lambda batch: (net(POINTS) - torch.sin(2 * POINTS)).square().mean(),
        [sgd],
    )
    last = float(np.mean(losses[-10:]))
    return last if last < 10 else 10.0


RATES = np.geomspace(0.01, 1.0, 13)
tried = {delay: [loss_at(rate, delay) for rate in RATES] for delay in (1, 2, 4)}


def draw_rates(file):
    """Draw the loss against the learning rate, for each delay."""
    figure, panel = plt.subplots(figsize=(7.2, 3.0))
    for colour, (delay, losses) in zip(COLOURS, tried.items(), strict=False):
        panel.loglog(RATES, losses, color=colour, marker=".", label=f"d = {delay}")
    panel.set(xlabel="learning rate", ylabel="loss after 150 steps")
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(file, dpi=100, bbox_inches="tight", format="png")
    plt.close(figure)


picture(
    draw_rates,
    "Loss after 150 steps against the learning rate, for delays 1, 2 and 4: with small rates the "
    "curves lie on each other; the larger the delay, the earlier the curve turns up.",
)

# %%
for delay, losses in tried.items():
    best = int(np.argmin(losses))
    print(f"d = {delay}: best learning rate {RATES[best]:.3f}, loss {losses[best]:.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# With small rates the three are the same: the weights have hardly changed in the meantime. The largest
# delay turns up first. So with old weights one has to take smaller steps, and needs more of them.
#
# </details>
#
# ## Now on real processes
#
# Two sites of one process each. They meet after every 5 steps, and count what they send.

# %% tags=["real"]
program = """
import torch
import minidist
from minidist.slow_wires import DiLoCo

comm = minidist.init()
torch.manual_seed(0)
model = torch.nn.Linear(1000, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.0005)
outer = DiLoCo(model.parameters(), comm, every=5)
torch.manual_seed(comm.rank + 1)
rows = torch.randn(64, 1000)
for step in range(1, 11):
    sgd.zero_grad()
    loss = (model(rows).squeeze(1) - rows[:, :9].sum(1)).square().mean()
    loss.backward()
    sgd.step()
    outer.stepped()
    first = model.weight[0, 0].item()
    print(f"rank {comm.rank}, step {step}: loss {loss.item():.3f}, first weight {first:.4f}", flush=True)
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "sites.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 2 {file}

# %% [markdown]
# Next: [lesson 22](../lessons/22_slow_wires/README.md), where you write the three ways down.

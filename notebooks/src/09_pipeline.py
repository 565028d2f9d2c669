# %% [markdown]
# # 09 · Pipeline
#
# Four ranks hold a quarter of the layers each. Below, who works when: a row is a rank, a number is
# a microbatch, and grey is waiting. The same four microbatches twice: first one at a time, then
# with 1F1B.

# %%
import sys

import matplotlib.pyplot as plt
import numpy as np

import minidist
from minidist.draw.notebook import picture, schedules, show
from minidist.draw.pipeline import draw_text
from minidist.draw.recording import record
from minidist.full.pipeline import peak_activations, plan, read_plan, simulate

schedules(*(simulate(plan(name, 4, 4)) for name in ("naive", "1f1b")))

# %% [markdown]
# Blue is a forward, green a backward, which takes twice as long. Both pictures end when the last
# gradient has come back to rank 0.
#
# ## The bubble
#
# **Predict:** GPipe does all forwards, then all backwards. With 4 ranks and 4 microbatches, which
# share of the step is idle? What if a backward takes three times as long as a forward?

# %%
for backward in (2, 3):
    timeline = simulate(plan("gpipe", 4, 4), forward=1, backward=backward)
    print(f"backward {backward}: bubble {timeline.bubble:.6f}, (p - 1)/(m + p - 1) = {3 / 7:.6f}")
print(draw_text(simulate(plan("gpipe", 4, 4))))

# %% [markdown]
# <details><summary>The answer</summary>
#
# The costs cancel. The last rank waits p − 1 forwards and works m (F + B). Then the last gradient
# still has to pass through p − 1 backwards.
#
# </details>
#
# ## 1F1B: faster?
#
# **Predict:** 1F1B starts a backward as soon as it can. How much shorter than GPipe's is the step,
# for 4 ranks and 12 microbatches?

# %%
plans = {name: plan(name, 4, 12) for name in ("gpipe", "1f1b")}
for name, schedule in plans.items():
    print(
        f"{name:6} length {simulate(schedule).length:g}, microbatches held by each rank "
        f"{peak_activations(schedule)}"
    )

# %% [markdown]
# <details><summary>The answer</summary>
#
# It is not shorter at all. Only the memory differs: a rank holds every microbatch whose forward is
# done and whose backward is not, and with 1F1B these are fewer.
#
# </details>


# %%
def draw_held(file):
    """Draw how many microbatches ranks 0 and 3 hold at each moment."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 2.6), sharey=True, layout="constrained")
    for panel, (name, schedule) in zip(panels, plans.items(), strict=True):
        timeline = simulate(schedule)
        for rank, colour, line in ((0, "#0072B2", "-"), (3, "#D55E00", "--")):
            begins = zip(
                schedule.actions[rank], timeline.start[rank], timeline.end[rank], strict=True
            )
            changes = sorted((end, 1) if a.kind == "F" else (end, -1) for a, start, end in begins)
            times, held = (
                [0.0, *(at for at, _ in changes)],
                np.cumsum([0, *(by for _, by in changes)]),
            )
            panel.step(
                times, held, where="post", color=colour, linestyle=line, label=f"rank {rank}"
            )
        panel.set(title=name, xlabel="time (forwards)", ylim=(0, 13), yticks=range(0, 13, 4))
        panel.legend(frameon=False)
    panels[0].set_ylabel("microbatches held")
    figure.savefig(file, dpi=100)
    plt.close(figure)


picture(
    draw_held,
    "Microbatches held over time. Under GPipe ranks 0 and 3 both climb to 12 and come down again. "
    "Under 1F1B rank 0 never holds more than 4, rank 3 never more than one.",
)

# %% [markdown]
# ## How many microbatches are enough?
#
# **Predict:** on 8 ranks, from how many microbatches on is less than a tenth of the step lost? What
# does rank 0 then hold?

# %%
for microbatches in (8, 32, 62, 63, 64):
    schedule = plan("1f1b", 8, microbatches)
    print(
        f"{microbatches:3}: bubble {simulate(schedule).bubble:.6f}, rank 0 holds "
        f"{peak_activations(schedule)[0]}"
    )

# %% [markdown]
# ## Messages
#
# Now the same with real messages, on three simulated ranks: every rank adds *its colour* to what
# passes through it, so a forward gathers colours from left to right. **Predict:** how many messages
# does the middle rank send for two microbatches, forward and backward? Step through with the arrow
# keys.


# %%
def one_f_one_b(comm, wait):
    """Two microbatches under 1F1B; a rank that would wait for a send to be received goes on if
    `wait` is False.
    """
    left, right = comm.rank - 1, comm.rank + 1
    x = [comm.watch(f"output {m}", np.zeros(1)) for m in range(2)]
    dx = [comm.watch(f"gradient {m}", np.zeros(1)) for m in range(2)]
    sending = []

    def send(buffer, to, tag):
        sending.append(comm.isend(buffer, to, tag))
        if wait:
            sending[-1].wait()

    for action in plan("1f1b", comm.size, 2).actions[comm.rank]:
        m = action.microbatch
        with comm.span(str(action)):
            if action.kind == "F":
                if left >= 0:
                    comm.recv(x[m], left, tag=m)
                x[m] += comm.contribution
                if right < comm.size:
                    send(x[m], right, m)
            else:
                if right < comm.size:
                    comm.recv(dx[m], right, tag=m)
                dx[m] += comm.contribution
                if left >= 0:
                    send(dx[m], left, m)
    for request in sending:
        request.wait()


show(record(lambda comm: one_f_one_b(comm, wait=False), ranks=3), frames=4)

# %% [markdown]
# <details><summary>The answer</summary>
#
# One to the right and one to the left for each microbatch: four.
#
# </details>
#
# ## Break it
#
# **Predict:** this is the same schedule, and its actions do not depend on each other in a cycle.
# But now each send waits until it is received. Which rank waits for which?

# %%
broken = record(lambda comm: one_f_one_b(comm, wait=True), ranks=3)
print(broken.deadlock)
show(broken, frames=2)

# %% [markdown]
# <details><summary>The answer</summary>
#
# Rank 1 sends the output of microbatch 1 to its right, while rank 2 sends a gradient to its left.
# With a large enough tensor this happens on every cluster.
#
# </details>
#
# The package refuses a schedule that contains a cycle before anything is sent:

# %%
try:
    simulate(read_plan("0F0 0F1 0B0 0B1\n1F0 1B1 1F1 1B0"))
except ValueError as error:
    print(error)

# %% [markdown]
# ## Now on real processes
#
# A model of eight layers on four processes of this machine, trained by the package's executor: its
# loss is the serial one.

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
layers = [nn.Linear(8, 8, dtype=torch.float64) for _ in range(8)]
x, target = torch.randn(2, 16, 8, dtype=torch.float64)
stage = nn.Sequential(*layers[2 * comm.rank : 2 * comm.rank + 2])
loss = lambda y, t: ((y - t) ** 2).sum() / x.numel()
pipeline = Pipeline({comm.rank: stage}, comm, with_communication(plan("1f1b", 4, 8)), loss, torch.empty_like)
total = pipeline.step(x.chunk(8), target.chunk(8))
if comm.rank == 3:
    serial = loss(nn.Sequential(*layers)(x), target)
    print(f"pipeline {float(total):.6f}, serial {float(serial.detach()):.6f}")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "pipeline.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 4 {file}

# %% [markdown]
# Next: [lesson 09](../lessons/09_pipeline/README.md), where you write the schedules, and the code that runs them.

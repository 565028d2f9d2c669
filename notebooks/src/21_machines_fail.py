# %% [markdown]
# # 21 · Machines fail
#
# Four ranks add up their gradients, and rank 2 is gone in the middle of it. Step through what the
# others do: they wait, one after the other, for a message that never comes.

# %%
import contextlib
import io
import json
import operator
import re
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy as np

import minidist
from minidist import Cluster, Communicator, Layout
from minidist.cli.train import train_as
from minidist.draw.notebook import picture, show
from minidist.draw.recording import record
from minidist.full.collectives import all_reduce
from minidist.full.comm.errors import QuorumError
from minidist.full.comm.membership.agreement import Presence, View, Wanted, next_view
from minidist.full.comm.membership.member import Member
from minidist.full.comm.membership.simulated import run_members
from minidist.full.comm.membership.store import MemoryStore
from minidist.full.comm.wire import WireAround
from minidist.full.ddp.sampler import DistributedSampler
from minidist.full.trainer.observed.stragglers import Stragglers
from minidist.plan.failures.policies import POLICIES, Job, closed_form
from minidist.plan.failures.simulate import simulate
from minidist.ring import ring_all_reduce, ring_reduce_scatter

COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]


def ring(comm):
    """Add up one buffer; rank 2 is lost after the first half."""
    buffer = comm.watch("gradients", np.full(8, comm.contribution), cells=comm.size)
    chunks = np.array_split(buffer, comm.size)
    if comm.rank == 2:
        ring_reduce_scatter(chunks, comm, operator.iadd)
    else:
        ring_all_reduce(chunks, comm, operator.iadd)


stuck = record(ring, ranks=4)
print(stuck.deadlock)
show(stuck, frames=4)

# %% [markdown]
# On simulated ranks a report ends this. On a cluster nobody knows, for minutes, whether rank 2 is
# gone or slow. Look at the buffers: no rank has all sums, so no rank may update its weights.
#
# ## A run that loses ranks
#
# Here is the package's own trainer on four *members*, which are threads. `Mortal` counts what a
# member does on its wires, and kills it at one of these events. (It does not raise an error that
# somebody could handle: the thread ends, as a killed process would.) It waits for a moment first,
# so that the others go as far as they can without it.


# %%
class Killed(BaseException):
    """Nothing may catch it."""


class MortalWire(WireAround):
    def __init__(self, inner, life):
        super().__init__(inner)
        self.life = life

    def isend(self, *message):
        self.life.event()
        return super().isend(*message)

    def irecv(self, *message):
        self.life.event()
        return super().irecv(*message)

    def derive(self, *group, **options):
        return MortalWire(super().derive(*group, **options), self.life)


class Mortal:
    """A member that dies at an event, and notes its views."""

    def __init__(self, member, dies_at, views):
        self.member, self.dies_at, self.views, self.count = member, dies_at, views, 0

    def event(self):
        self.count += 1
        if self.count == self.dies_at:
            time.sleep(0.2)
            raise Killed

    def enter(self, done=-1, place=0):
        comm = self.member.enter(done, place)
        if comm is None:
            return None
        self.views[self.member.view.number] = self.member.view.members
        return Communicator(MortalWire(comm.wire, self), comm.ledger)

    def __getattr__(self, name):
        return getattr(self.member, name)


TEXT = "the quick brown fox jumps over the lazy dog. " * 40
SIZES = "--layers 1 --hidden 16 --heads 2 --sequence 16 --batch 8 --warmup 2 --steps 8"


def train(deaths):
    """Train on four members, of which some die; return losses, views, where each began, events."""
    views, events, printed = {}, {}, io.StringIO()
    with TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_text(TEXT)
        words = f"{SIZES} --precision float64 --text {folder}/text.txt --metrics {folder}/metrics"

        def program(member):
            mortal = Mortal(member, deaths.get(member.number, 0), views)
            status = train_as(mortal, words.split())
            events[member.number] = mortal.count
            return status

        with contextlib.redirect_stdout(printed):
            run_members(program, ranks=4)
        lines = Path(folder, "metrics").read_text().splitlines()
    begins = {1: 0}
    for number, step in re.findall(r"view (\d): .* after step (\d)", printed.getvalue()):
        begins[int(number)] = int(step)
    return [json.loads(line)["loss"] for line in lines], views, begins, events


calm, *_, events = train({})
print(f"nobody dies: {events[0]} events each;", *(f"{loss:.6f}" for loss in calm))

# %% [markdown]
# **Predict:** member 1 is killed at a third of its events, and member 2 at two thirds. How many
# steps are lost? In which digit do the losses differ?

# %%
losses, views, begins, _ = train({1: events[1] // 3, 2: events[2] * 2 // 3})
for number, members in sorted(views.items()):
    print(f"view {number}: members {members} go on after step {begins[number]}")
print("losses:", *(f"{loss:.6f}" for loss in losses))
far = max(abs(a / b - 1) for a, b in zip(losses, calm, strict=True))
print("the same losses to 1e-9:", far < 1e-9)


# %%
def draw_views(file):
    """Draw which member is which rank, step by step."""
    figure, panel = plt.subplots(figsize=(7.2, 2.4))
    for number, members in views.items():
        until = begins.get(number + 1, len(losses))
        for rank, member in enumerate(members):
            width = until - begins[number]
            panel.barh(member, width, left=begins[number], color=COLOURS[rank], edgecolor="white")
            panel.text(begins[number] + width / 2, member, f"rank {rank}", ha="center", va="center")
    for number in sorted(views)[1:]:
        panel.axvline(begins[number], color="black", linestyle=":")
    panel.set(xlabel="steps done", yticks=range(4), yticklabels=[f"member {m}" for m in range(4)])
    panel.invert_yaxis()
    figure.savefig(file, dpi=105, bbox_inches="tight", format="png")
    plt.close(figure)


picture(
    draw_views,
    "Four bars, one for each member. At each change of view a member's bar ends, and those below "
    "it become other ranks.",
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# No step is lost: whoever was ready for a step that somebody had taken took it alone. The losses
# are the same but for rounding, since three ranks add up in another order than four. Member 3 was
# rank 3, then 2, then 1.
#
# </details>
#
# ## The same samples
#
# **Predict:** step 0 has eight samples. Who trains on which of them on four ranks, on three, on two?


# %%
def draw_shares(file):
    """Draw which rank has which sample of two steps, by the number of ranks."""
    figure, panel = plt.subplots(figsize=(7.2, 2.2))
    for row, ranks in enumerate((4, 3, 2)):
        for rank in range(ranks):
            batches = list(DistributedSampler(16, ranks, rank, seed=1, batch=8))
            for step, samples in enumerate(batches):
                before = sum(
                    len(list(DistributedSampler(16, ranks, other, seed=1, batch=8))[step])
                    for other in range(rank)
                )
                for at, sample in enumerate(samples):
                    left = 9 * step + before + at
                    panel.barh(row, 1, left=left, color=COLOURS[rank], edgecolor="white")
                    panel.text(left + 0.5, row, sample, ha="center", va="center")
    panel.set(
        yticks=range(3),
        yticklabels=["4 ranks", "3 ranks", "2 ranks"],
        xticks=(4, 13),
        xticklabels=("step 0", "step 1"),
    )
    panel.invert_yaxis()
    panel.legend(
        [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS[:4]],
        [f"rank {rank}" for rank in range(4)],
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        frameon=False,
    )
    figure.savefig(file, dpi=105, bbox_inches="tight", format="png")
    plt.close(figure)


picture(
    draw_shares,
    "Three rows of samples, for four, three and two ranks. The samples of each step and their "
    "order are the same in each row; the colours, which are the ranks, cut them at other places.",
)

# %% [markdown]
# ## Who is slow?
#
# Eight ranks on a modelled cluster; rank 5 computes 1.5 times as long. **Predict:** the bar of each
# rank is the time of a step. Which parts of it differ between rank 5 and the others?


# %%
def step(comm):
    """Compute and reduce; return the seconds of both."""
    comm.advance((1.5 if comm.rank == 5 else 1.0) + 0.02 * (comm.rank % 3))
    computed = comm.clock()
    all_reduce(np.ones(1000), comm)
    return computed, comm.clock() - computed


seconds = minidist.run(step, ranks=8, cluster=Cluster.h100(nodes=1))


def draw_step(file):
    """Draw computing and waiting of each rank."""
    figure, panel = plt.subplots(figsize=(7.2, 2.6))
    computed, waited = (np.array(column) for column in zip(*seconds, strict=True))
    panel.barh(range(8), computed, color=COLOURS[0], label="computes")
    panel.barh(range(8), waited, left=computed, color=COLOURS[4], label="in messages")
    panel.set(xlabel="seconds", yticks=range(8), yticklabels=[f"rank {rank}" for rank in range(8)])
    panel.invert_yaxis()
    panel.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(file, dpi=105, bbox_inches="tight", format="png")
    plt.close(figure)


picture(
    draw_step,
    "Eight bars of equal length. Seven have a long second part, waiting; rank 5 has none.",
)

# %%
stragglers = Stragglers(Layout(dp=8), batch=64)
for number in range(1, 7):
    said = stragglers.step([computed for computed, _ in seconds])
    named = "nobody" if said.straggler is None else f"rank {said.straggler}"
    print(f"after step {number}: {named}")

# %% [markdown]
# It has to last: a rank is named when it has been slow for five steps, in the median.
#
# ## What is left of the time?
#
# Each GPU fails once in 5.8 years, as Llama 3's did. A restart takes ten minutes, a repair four
# hours, and 512 GPUs are a replica. Lines are closed forms; dots are drawn failures, a thousand for
# each. **Predict:** where does *spare* fall below one half?


# %%
def job(gpus):
    """Return the job of so many GPUs, as failures see it."""
    mtbf = 5.8 * 365 * 86400 / gpus
    times = {"step": 10.0, "write": 10.0, "restart": 600.0, "stall": 30.0, "repair": 14400.0}
    return Job(mtbf, **times, replicas=max(2, gpus // 512))


sizes = np.geomspace(1000, 300_000, 40)
dots = (1024, 4096, 16384, 65536, 262_144)
curves = {policy: [closed_form(job(int(gpus)), policy) for gpus in sizes] for policy in POLICIES}
drawn = {
    policy: [simulate(job(gpus), policy, failures=1000).training for gpus in dots]
    for policy in POLICIES
}


def draw_goodput(file):
    """Draw the share that trains against the number of GPUs."""
    figure, panel = plt.subplots(figsize=(7.2, 3.2))
    for colour, policy in zip(COLOURS, POLICIES, strict=False):
        panel.semilogx(sizes, 100 * np.array(curves[policy]), color=colour, label=policy)
        panel.semilogx(dots, 100 * np.array(drawn[policy]), "o", color=colour)
    panel.set(xlabel="GPUs", ylabel="% of the time trains", ylim=(0, 102))
    panel.grid(alpha=0.3)
    panel.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(file, dpi=105, bbox_inches="tight", format="png")
    plt.close(figure)


picture(
    draw_goodput,
    "Share of the time that trains, against the number of GPUs: restart falls first, then spare; "
    "replace and quorum stay high up to a hundred thousand GPUs and beyond.",
)

# %%
print(f"{'GPUs':>8}", *(f"{policy:>18}" for policy in POLICIES))
for at, gpus in enumerate(dots):
    cells = (
        f"{closed_form(job(gpus), policy):6.1%}, drawn {drawn[policy][at]:5.1%}"
        for policy in POLICIES
    )
    print(f"{gpus:8,}", *(f"{cell:>18}" for cell in cells))

# %% [markdown]
# <details><summary>The answer</summary>
#
# Between 100,000 and 200,000 GPUs: there a failure comes every quarter of an hour or so, and a
# restart takes ten minutes. *quorum* lacks a twenty-fifth of its replicas at any size, and stands
# still for a minute at each failure.
#
# </details>
#
# ## Break it: two that cannot see the others
#
# A switch is broken. Members 2 and 3 of four see each other, and nobody else. **Predict:** what do
# they decide? What would happen if they decided by themselves?

# %%
last = View(1, (0, 1, 2, 3))
store = MemoryStore()
store.claim("view 1", "0 1 2 3")
store.append("present 2", "2,5,0 ")
cut_off = Member(store, 3, Wanted(4), started=4, grace=0.1, patience=0.3)
cut_off.view = last
try:
    cut_off.join(done=5)
except QuorumError as error:
    print(error)
others = [Presence(member, done=5) for member in (0, 1)]
print("and the other half:", next_view(last, others, (), Wanted(4)))

# %% [markdown]
# <details><summary>The answer</summary>
#
# They give up. Two of four are no majority, and the half with the lowest member, 0, goes on. If both
# did, two runs would write into one folder, and each would take the other's checkpoints for its
# own.
#
# </details>
#
# ## Now on real processes
#
# Three processes; the second one kills itself in step 50. The others go on, until the process that is
# started in its place is there.

# %% tags=["real"]
program = """
import os, signal, time
import numpy as np
from minidist.full.collectives import all_reduce
from minidist.full.comm.errors import RankFailed
from minidist.full.comm.torch_wire.torch_member import this_member

member, done, weight = this_member(), 0, np.zeros(1)
while (comm := member.enter(done)) is not None:
    try:
        held = comm.all_gather_object((done, float(weight[0])))
        done, weight[0] = max(held)
        place = f"rank {comm.rank} of {comm.size}, after step {done}"
        print(f"view {member.view.number}: member {member.number} is {place}", flush=True)
        while done < 100:
            if member.number == 1 and done == 50:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05)  # the backward
            gradient = np.ones(1)
            all_reduce(gradient, comm, op="mean")
            weight, done = weight + gradient, done + 1
            if comm.all_gather_object(member.is_awaited())[0]:
                member.leave("a member waits outside")
                break
        else:
            member.finish()
            print(f"member {member.number}: {done} steps, weight {weight[0]:g}", flush=True)
            break
    except RankFailed as error:
        member.lost(str(error))
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "members.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 3 --replace --max-restarts 2 {file}

# %% [markdown]
# Next: [lesson 21](../lessons/21_machines_fail/README.md), where you write down who goes on, and with what.

# %% [markdown]
# # 14 · Meshes
#
# Eight ranks train one GPT: two replicas (dp), two stages (pp), every matrix in two (tp). Which
# rank sends to which? The picture shows every byte of one step, counted from the messages of the
# package's own code; the colours are the axes.

# %%
import sys
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Patch

import minidist
from minidist import Cluster, Layout, Mesh, Trace
from minidist.draw.notebook import picture, show
from minidist.draw.recording import record
from minidist.full import Recipe, parallelize, vocabulary_parallel_cross_entropy_sum
from minidist.full.collectives import all_reduce
from minidist.full.model import GPT, GPTConfig, cross_entropy_sum
from minidist.full.trace.events import messages

SIZES = GPTConfig(vocabulary=32, layers=8, hidden=16, heads=8, intermediate=32, sequence=8)
COLOURS = {"tp": "#D55E00", "pp": "#009E73", "dp": "#0072B2"}


def spread(mesh, microbatches=2):
    """Spread the GPT over a mesh."""
    loss = cross_entropy_sum
    if mesh.layout.tp > 1:
        loss = partial(vocabulary_parallel_cross_entropy_sum, comm=mesh.tp, vocabulary=32)

    def carried(tokens):
        return torch.empty(*tokens.shape, SIZES.hidden, dtype=torch.float64, device="meta")

    return parallelize(
        GPT(SIZES, dtype=torch.float64), mesh, Recipe(microbatches=microbatches), loss, carried
    )


def take_step(parallel, microbatches=2):
    """Run forward and backward of some tokens; return the loss."""
    tokens = [(torch.arange(9) * (k + 3) % 32).view(1, 9) for k in range(microbatches)]
    return parallel.step([t[:, :-1] for t in tokens], [t[:, 1:] for t in tokens])


def traffic(layout):
    """Return bytes [sender, receiver] of one step."""
    trace = Trace()

    def program(comm):
        parallel = spread(Mesh(comm, layout))
        comm.barrier()
        started = len(trace.events) if comm.rank == 0 else None
        comm.barrier()
        take_step(parallel)
        return started

    started = minidist.run(program, layout.size, trace=trace)[0]
    found = np.zeros((layout.size, layout.size), dtype=int)
    for send, receive in messages(trace.events[started:]):
        found[send.rank, receive.rank] += send.bytes
    return found


def axis_between(layout, one, other):
    """Return the axis along which two ranks are neighbours."""
    return next(axis for axis in COLOURS if other in layout.group(axis, one))


def draw_traffic(layout, found, file):
    """Draw the matrix of bytes, a cell coloured by its axis."""
    figure, panel = plt.subplots(figsize=(6.6, 5.4))
    for one, other in np.argwhere(found):
        colour = COLOURS[axis_between(layout, one, other)]
        panel.add_patch(plt.Rectangle((other - 0.5, one - 0.5), 1, 1, color=colour))
        panel.text(
            other,
            one,
            f"{found[one, other]:,}",
            ha="center",
            va="center",
            fontsize=7,
            color="white",
        )
    names = [
        f"{rank}:  " + " ".join(f"{a}{layout.coordinate(rank)[a]}" for a in ("dp", "pp", "tp"))
        for rank in range(8)
    ]
    panel.set(
        xlim=(-0.5, 7.5), ylim=(7.5, -0.5), xticks=range(8), yticks=range(8), yticklabels=names
    )
    panel.set(xlabel="receiver", ylabel="sender", title="bytes of one step, dp=2 pp=2 tp=2")
    panel.set_aspect("equal")
    handles = [Patch(color=colour, label=axis) for axis, colour in COLOURS.items()]
    panel.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    figure.savefig(file, dpi=110, bbox_inches="tight", format="png")
    plt.close(figure)


EIGHT = Layout(dp=2, pp=2, tp=2)
picture(
    lambda file: draw_traffic(EIGHT, traffic(EIGHT), file),
    "Bytes from each of eight ranks to each other in one step of dp=2 pp=2 tp=2. Every rank sends "
    "to three: along dp 44,000 bytes, along tp 35,000, along pp 2,048; to all others nothing.",
)

# %% [markdown]
# Every rank exchanges messages with three others, one along each axis: no other cell has a colour.
# A mesh is an array of ranks, and its groups are slices.
#
# ## One message along each axis
#
# Eight ranks are two replicas (dp) of two stages (pp) of two halves (tp). The ranks of a
# tensor group add up their terms. The second stage receives the sum. At the end each rank adds its
# gradient to that of its twin in the other replica. A colour shows whose numbers a cell holds.


# %%
def one_of_each(comm):
    mesh = Mesh(comm, Layout(dp=2, pp=2, tp=2))
    term = comm.watch("summed along tp", np.full(1, comm.contribution))
    came = comm.watch("sent along pp", np.zeros(1, int))
    gradient = comm.watch("summed along dp", np.zeros(1, int))
    all_reduce(term, mesh.tp)
    if mesh.pp.rank == 0:
        mesh.pp.send(term, 1)
    else:
        mesh.pp.recv(came, 0)
    gradient[:] = comm.contribution
    all_reduce(gradient, mesh.dp)


show(record(one_of_each, ranks=8), frames=3)

# %% [markdown]
# ## Where is a rank?
#
# **Predict:** 12 ranks as dp=3, pp=2, tp=2. Which coordinates has rank 9, and with whom does it
# share matrices, stages and gradients?

# %%
layout = Layout(dp=3, pp=2, tp=2)
place = {axis: layout.coordinate(9)[axis] for axis in ("dp", "pp", "tp")}
groups = {axis: layout.group(axis, 9) for axis in ("dp", "pp", "tp")}
print(layout, place, groups, sep="\n")

# %% [markdown]
# <details><summary>The answer</summary>
#
# 9 = 2 · 4 + 0 · 2 + 1: the coordinates are the digits of the number.
#
# </details>
#
# ## How many bytes along each axis?
#
# **Predict:** the same model and the same tokens on each replica; eight ranks along one axis, along
# two, along three. Along which axis are most bytes sent, and which layout sends fewest in all?


# %%
def sent(comm, layout):
    mesh = Mesh(comm, layout)
    parallel = spread(mesh)
    axes = {"dp": mesh.dp, "pp": mesh.pp, "tp": mesh.tp}
    before = {axis: group.traffic.bytes for axis, group in axes.items()}
    take_step(parallel)
    return [group.traffic.bytes - before[axis] for axis, group in axes.items()]


lines = [f"{'':14}{'dp':>11}{'pp':>11}{'tp':>11}   bytes, all ranks"]
for layout in (Layout(dp=8), Layout(pp=8), Layout(tp=8), Layout(dp=4, tp=2), EIGHT):
    total = np.sum(
        minidist.run(lambda comm, layout=layout: sent(comm, layout), layout.size), axis=0
    )
    lines.append(
        f"dp={layout.dp} pp={layout.pp} tp={layout.tp}" + "".join(f"{bytes:11,}" for bytes in total)
    )
print("\n".join(lines))

# %% [markdown]
# <details><summary>The answer</summary>
#
# A pipeline sends least: one activation a microbatch, to one neighbour. What dp sends shrinks as tp
# and pp cut the model. What tp sends grows with the tokens, and here are only 16 of them on each
# replica.
#
# </details>
#
# ## Which axis on which wire?
#
# **Predict:** two DGX H100, 16 GPUs. All-reduces of 64 MiB run in both groups of 8 at once. How
# much slower are they if each group lies across both machines?


# %%
def seconds(comm, color):
    group = comm.split(color(comm.rank))
    start = comm.clock()
    # float32 that is not there
    all_reduce(torch.empty(2**24, device="meta"), group, algorithm="ring")
    return comm.clock() - start


lines = []
for name, color in (
    ("each inside a machine", lambda rank: rank // 8),
    ("every second rank", lambda rank: rank % 2),
):
    cluster = Cluster.h100(nodes=2)
    times = minidist.run(lambda comm, color=color: seconds(comm, color), ranks=16, cluster=cluster)
    lines.append(f"{name:22} {1000 * max(times):.3f} ms")
print("\n".join(lines))

# %% [markdown]
# <details><summary>The answer</summary>
#
# 8.2 times. The wires' bandwidths differ by nine (450 and 50 GB/s), and each of a ring's 14
# messages has a latency as well. A ring is as slow as its slowest wire. So tp, which sends most
# often and is waited for, is the innermost axis: its groups are neighbours.
#
# </details>
#
# ## Does a mesh change what is learned?
#
# **Predict:** the loss of a step and the norm of its gradient, for the serial model and on eight
# ranks, pp=2 tp=4. To how many digits do they agree?


# %%
def loss_and_norm(comm, layout):
    mesh = Mesh(comm, layout)
    parallel = spread(mesh)
    loss = take_step(parallel).double().reshape(1)
    all_reduce(loss, mesh.pp)  # the last stage alone has computed it
    return loss.item(), parallel.clip(0).item()


lines = []
for layout in (Layout(), Layout(pp=2, tp=4)):
    loss, norm = minidist.run(lambda comm, layout=layout: loss_and_norm(comm, layout), layout.size)[
        0
    ]
    lines.append(f"pp={layout.pp} tp={layout.tp}: loss {loss:.6f}, norm {norm:.6f}")
print("\n".join(lines))

# %% [markdown]
# ## Break it: count copies
#
# The norms of a layer are not cut: all tensor parallel ranks hold them. **Predict:** we add up the
# squares of all ranks, copies included. How does the norm change with tp?


# %%
def with_copies(comm, layout):
    mesh = Mesh(comm, layout)
    parallel = spread(mesh)
    take_step(parallel)
    # this rank's alone
    parts = [parameter.grad.as_subclass(torch.Tensor) for parameter in parallel.replica.trained]
    squares = sum(part.square().sum() for part in parts).reshape(1)
    all_reduce(squares, comm)
    return squares.sqrt().item(), parallel.clip(0).item()


lines = []
for tp in (1, 2, 4, 8):
    wrong, right = minidist.run(lambda comm, tp=tp: with_copies(comm, Layout(tp=tp)), tp)[0]
    lines.append(f"tp={tp}: {wrong:.6f} with copies, {right:.6f} as clip counts")
print("\n".join(lines))

# %% [markdown]
# <details><summary>The answer</summary>
#
# There is no error: the run is only clipped a little more on a larger mesh. You find such a bug
# only if you compare with the serial run.
#
# </details>
#
# ## Break it: groups made in two orders
#
# **Predict:** odd ranks make their communicator along tp first, even ranks that along dp. `split`
# is collective. Which groups result? If all ranks add up ones along each axis, which sums do they
# see?


# %%
def two_orders(comm):
    layout, found = Layout(dp=2, tp=2), {}
    for axis in ("dp", "tp") if comm.rank % 2 == 0 else ("tp", "dp"):
        found[axis] = comm.split(layout.group(axis, comm.rank)[0])
    sums = {axis: np.ones(1) for axis in ("tp", "dp")}
    for axis, ones in sums.items():
        all_reduce(ones, found[axis])
    return [f"{axis} {found[axis].members} sums to {ones[0]:g}" for axis, ones in sums.items()]


print(
    "\n".join(
        f"rank {rank}: " + ", ".join(lines)
        for rank, lines in enumerate(minidist.run(two_orders, ranks=4))
    )
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# Each call to `split` mixed the colours of two axes. Nothing hangs here, but a rank adds its
# gradients to those of wrong ranks. All ranks have to make all groups in the same order; `Mesh`
# does this.
#
# </details>
#
# ## Now on real processes
#
# A mesh of four processes, under `mpirun`.

# %% tags=["real"]
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import numpy as np, minidist
from minidist import Layout, Mesh
from minidist.full.collectives import all_reduce

comm = minidist.init()
mesh = Mesh(comm, Layout(dp=2, tp=2))
along_tp, along_dp = np.full(1, 10.0 ** comm.rank), np.full(1, 10.0 ** comm.rank)
all_reduce(along_tp, mesh.tp)
all_reduce(along_dp, mesh.dp)
print(f"dp {mesh.dp.rank}, tp {mesh.tp.rank}: the sum along tp is {along_tp[0]:g}, along dp {along_dp[0]:g}")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "mesh.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 4 {file}

# %% [markdown]
# Next: [lesson 14](../lessons/14_meshes/README.md), where you build the mesh, and choose one for 64 GPUs.

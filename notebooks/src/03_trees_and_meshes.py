# %% [markdown]
# # 03 · Trees and meshes
#
# Rank 0 has data that all eight ranks need. In each round, every rank that has the data sends them
# to one more rank: one, two, four, eight ranks have them. Step through it with the arrow keys
# (click into the player first).

# %%
import math
import sys

import numpy as np
import torch

import minidist
from minidist import Cluster, Trace
from minidist.draw.notebook import picture, show
from minidist.draw.recording import record
from minidist.full.collectives import all_reduce, broadcast


def tree(comm):
    buffer = comm.watch("buffer", np.array([comm.contribution if comm.rank == 0 else 0]))
    broadcast(buffer, comm, algorithm="tree")


show(record(tree, ranks=8, cluster=Cluster.uniform(latency=0, bandwidth=8)))

# %% [markdown]
# ## How many rounds?
#
# **Predict:** a rank needs one second to send a message. When does the last of P ranks have the
# data, for P = 2, 4, 5, 8, 9 and 64? And when, if the root sends to every rank itself?


# %%
def last(comm, algorithm):
    broadcast(np.zeros(1), comm, algorithm=algorithm)
    return comm.clock()


def seconds(ranks, algorithm):
    cluster = Cluster.uniform(latency=0, bandwidth=8)  # bytes a second: a double takes one
    return max(minidist.run(lambda comm: last(comm, algorithm), ranks, cluster=cluster))


lines = []
for ranks in (2, 4, 5, 8, 9, 64):
    lines.append(
        f"{ranks:2} ranks: tree {seconds(ranks, 'tree'):.0f} s, centre "
        f"{seconds(ranks, 'central'):2.0f} s"
    )
print("\n".join(lines))

# %% [markdown]
# <details><summary>The answer</summary>
#
# ceil(log2 P) rounds instead of P - 1, because in each round every rank that has the data sends.
#
# </details>
#
# ## Halving, then doubling
#
# **Predict:** four ranks, a buffer of four chunks. After the first exchange of halves, how many
# contributions are in each cell of rank 0? Which cell is complete first, on which rank?


# %%
def halving(comm):
    buffer = comm.watch("buffer", np.full(8, comm.contribution), cells=comm.size)
    all_reduce(buffer, comm, algorithm="halving_doubling")


show(record(halving, ranks=4, formulas={"bytes sent": "2 (P − 1)/P · n = 2 · 3/4 · 64 = 96"}))

# %% [markdown]
# <details><summary>The answer</summary>
#
# It sends as many bytes as the ring, in 2 log2 P = 4 messages instead of 2 (P − 1) = 6. With 64
# ranks these are 12 messages instead of 126.
#
# </details>
#
# ## Which algorithm for which size?
#
# **Predict:** 16 ranks, 10 µs, 1 GB/s. Below which size is doubling (whole buffers, log2 P rounds)
# fastest? Is the tree ever the fastest? Lines are the formulas; points are the times of the
# package's algorithms on the virtual clock.

# %%
RANKS, LATENCY, BANDWIDTH = 16, 10e-6, 1e9
ROUNDS = math.log2(RANKS)
LEAST = 2 * (RANKS - 1) / RANKS  # buffers that a rank has to send at least
MODELS = {
    "ring": ("#D55E00", 2 * (RANKS - 1), LEAST),
    "tree": ("#009E73", 2 * ROUNDS, 2 * ROUNDS),
    "recursive": ("#0072B2", ROUNDS, ROUNDS),
    "halving_doubling": ("#000000", 2 * ROUNDS, LEAST),
}
SIZES = [128 * 4**power for power in range(9)]


def finished(comm, algorithm, bytes):
    all_reduce(
        torch.empty(bytes // 8, dtype=torch.float64, device="meta"), comm, algorithm=algorithm
    )
    return comm.clock()


def measured(algorithm, bytes, ranks=RANKS):
    cluster = Cluster.uniform(LATENCY, BANDWIDTH)
    return max(minidist.run(lambda comm: finished(comm, algorithm, bytes), ranks, cluster=cluster))


def draw_costs(file):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, (colour, messages, buffers) in MODELS.items():
        formula = [1e6 * (messages * LATENCY + buffers * bytes / BANDWIDTH) for bytes in SIZES]
        axes.loglog(SIZES, formula, color=colour, label=name)
        axes.loglog(SIZES, [1e6 * measured(name, bytes) for bytes in SIZES], "o", color=colour)
    axes.axvline(crossover, color="#999999", linestyle="--")
    axes.annotate(f" n* = {crossover:,.0f} bytes", (crossover, 3e4), color="#555555")
    axes.set_xlabel("bytes of the buffer")
    axes.set_ylabel("microseconds of an all-reduce")
    axes.legend(title=f"{RANKS} ranks, 10 µs, 1 GB/s", frameon=False)
    figure.savefig(file, dpi=110)


crossover = ROUNDS * LATENCY * BANDWIDTH / (ROUNDS - LEAST)
picture(
    draw_costs,
    "Microseconds of an all-reduce against bytes, both logarithmic, for four algorithms on 16 "
    "ranks",
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# Recursive doubling is lowest up to n* = 18,824 bytes, halving-doubling beyond; the ring meets it
# from about a megabyte on; the tree is never lowest.
#
# Left of n* doubling is fastest, right of it halving-doubling. The ring comes close for large
# buffers only; the tree is never fastest here. (The ring has other merits: it talks to neighbours
# only, and takes any number of ranks.)
#
# </details>
#
# **Predict:** 8 MB, but 17 ranks instead of 16: what happens to halving-doubling, and to the ring?

# %%
lines = []
for name in ("halving_doubling", "ring"):
    for ranks in (16, 17):
        lines.append(f"{name:17} {ranks} ranks {1000 * measured(name, 8_000_000, ranks):7.3f} ms")
print("\n".join(lines))

# %% [markdown]
# <details><summary>The answer</summary>
#
# The 17th rank sends its whole buffer to another rank and gets the whole result back. This takes 2
# n/bandwidth more.
#
# </details>
#
# ## All-to-all: the order counts
#
# **Predict:** eight ranks, 100 kB from each to each. Either every rank sends to rank 0 first, then
# to rank 1, and so on; or in step s every rank sends to the rank s places after it. Both orders
# have the same messages and the same bytes. Which one is faster, and by how much?


# %%
def everybody_to_everybody(comm, pairwise):
    leaving, arriving = np.zeros((comm.size, 12_500)), np.zeros((comm.size, 12_500))
    targets = [(comm.rank + step) % comm.size for step in range(1, comm.size)]
    sources = [(comm.rank - step) % comm.size for step in range(1, comm.size)]
    if not pairwise:
        targets, sources = sorted(targets), sorted(sources)
    requests = [comm.irecv(arriving[rank], rank) for rank in sources]
    requests += [comm.isend(leaving[rank], rank) for rank in targets]
    for request in requests:
        request.wait()
    return comm.clock()


lines = []
for pairwise in (False, True):
    cluster = Cluster.uniform(LATENCY, BANDWIDTH)
    times = minidist.run(
        lambda comm, pairwise=pairwise: everybody_to_everybody(comm, pairwise), 8, cluster=cluster
    )
    name = "pairwise:    " if pairwise else "0, 1, 2, ...:"
    lines.append(" ".join([name, *(f"{1000 * time:.2f}" for time in times), "ms"]))
print("\n".join(lines))

# %% [markdown]
# <details><summary>The answer</summary>
#
# In the first order all ranks queue at one port while the other ports are idle.
#
# </details>
#
# ## Two levels
#
# **Predict:** 1 GiB on 4 nodes of 8 GPUs (450 GB/s inside, 50 GB/s across, for each GPU). How many
# GiB cross between nodes, over all ranks, with a ring and with two levels? Which is faster, and by
# how much?


# %%
def gigabyte(comm, algorithm):
    all_reduce(torch.empty(2**28, device="meta"), comm, algorithm=algorithm)
    return comm.clock()


lines = []
for algorithm in ("ring", "halving_doubling", "hierarchical"):
    cluster, trace = Cluster.h100(nodes=4), Trace()
    times = minidist.run(
        lambda comm, name=algorithm: gigabyte(comm, name), ranks=32, cluster=cluster, trace=trace
    )
    sends = [event for event in trace.events if event.kind == "send"]
    across = sum(
        e.bytes
        for e in sends
        if cluster.node_of(e.rank) != cluster.node_of(int(e.name.split()[-1]))
    )
    lines.append(
        f"{algorithm:17} {1000 * max(times):6.2f} ms, {across / 2**30:6.2f} GiB between nodes"
    )
print("\n".join(lines))

# %% [markdown]
# <details><summary>The answer</summary>
#
# A flat ring crosses between nodes at four places: four ports carry all the bytes, and 28 ports are
# idle. Halving-doubling begins with the farthest partner, so its largest messages cross between
# nodes. With two levels the fewest bytes cross, and all 32 ports work at the same time.
#
# </details>
#
# ## Break it
#
# **Predict:** what happens with doubling on three ranks if `partner = rank ^ distance`, which is
# right for two and four ranks? And with a broadcast from rank 2 if the tree counts from rank 0?


# %%
def doubling(comm):
    total, arriving, distance = np.array([float(comm.rank)]), np.empty(1), 1
    while distance < comm.size:
        comm.exchange(total, comm.rank ^ distance, arriving, comm.rank ^ distance)
        total += arriving
        distance *= 2


def counts_from_zero(comm, root):
    buffer = np.array([100.0 + comm.rank])
    broadcast(buffer, comm, root=0, algorithm="tree")  # should be root=root
    return buffer.item()


try:
    minidist.run(doubling, ranks=3)
except ValueError as error:
    print(f"{type(error).__name__}: {error}")
print(
    "from rank 2 comes 102.0, but all have",
    minidist.run(lambda comm: counts_from_zero(comm, root=2), ranks=4),
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# The first mistake raises an error at once. The second one gives a wrong number on every rank, the
# same on all ranks. So no comparison of the ranks finds it.
#
# </details>
#
# ## Now on real processes
#
# Task 4's three steps, under `mpirun`, on four processes that play two nodes of two.

# %% tags=["real"]
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import numpy as np, minidist
from minidist.full.collectives import all_gather, all_reduce, reduce_scatter

comm = minidist.init()
inside, across = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
shard = reduce_scatter(np.arange(4.0) + comm.rank, inside, algorithm="ring")
all_reduce(shard, across, algorithm="ring")
total = all_gather(shard, inside, algorithm="ring")
print(f"rank {comm.rank}: {total}, {across.traffic.bytes} of {comm.traffic.bytes} bytes crossed")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "levels.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 4 {file}

# %% [markdown]
# Next: [lesson 03](../lessons/03_trees_and_meshes/README.md), where you write them yourself.

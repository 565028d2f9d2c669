# %% [markdown]
# # 02 · Ring all-reduce
#
# Four ranks each hold a buffer; all of them need the sum. Here is the whole algorithm, as it ran. A
# colour shows whose contribution a cell holds. Step through it with the arrow keys (click into the
# player first).

# %%
import operator
import sys

import numpy as np
import torch

import minidist
from minidist import Cluster
from minidist.draw.notebook import show
from minidist.draw.recording import record
from minidist.full.collectives import all_reduce
from minidist.ring import ring_all_reduce


def ring(comm):
    buffer = comm.watch("buffer", np.full(8, comm.contribution), cells=comm.size)
    ring_all_reduce(np.array_split(buffer, comm.size), comm, operator.iadd)


show(record(ring, ranks=4, formulas={"bytes sent": "2 (P − 1)/P · n = 2 · 3/4 · 64 = 96"}))

# %% [markdown]
# Each row is a rank. In the first half (*reduce-scatter*) a chunk gathers one colour more with each
# hop; then rank r holds the complete chunk r. In the second half (*all-gather*) the complete chunks
# go around the ring until every rank has all of them.
#
# ## What does a rank send?
#
# **Predict:** a buffer of n = 800 bytes on 4 ranks. How many messages does each rank send, and how
# many bytes? And how many if a central rank collects and returns everything?


# %%
def traffic(comm, algorithm):
    all_reduce(np.ones(100), comm, algorithm=algorithm)
    return comm.traffic.messages, comm.traffic.bytes


for algorithm in ("ring", "central"):
    print(
        algorithm, minidist.run(lambda comm, algorithm=algorithm: traffic(comm, algorithm), ranks=4)
    )

# %% [markdown]
# <details><summary>The answer</summary>
#
# In a ring, each rank sends 2 (P − 1)/P · n bytes. The central rank sends (P − 1) n bytes, and all
# other ranks wait for its wire.
#
# </details>
#
# ## How long does it take?
#
# **Predict:** twice as many GPUs, the same gigabyte on each. Does the ring take twice as long? (A
# modelled cluster: a message takes latency + bytes/bandwidth, on a virtual clock.)


# %%
def seconds(comm, algorithm):
    gradients = torch.empty(2**28, device="meta")  # 1 GiB that is not there
    all_reduce(gradients, comm, algorithm=algorithm)
    return comm.clock()


for ranks in (2, 4, 8):
    cluster = Cluster.h100(nodes=1)
    for algorithm in ("ring", "central"):
        times = minidist.run(
            lambda comm, name=algorithm: seconds(comm, name), ranks=ranks, cluster=cluster
        )
        print(f"{ranks} GPUs  {algorithm:8} {1000 * max(times):8.3f} ms")

# %% [markdown]
# <details><summary>The answer</summary>
#
# The time of the ring tends to 2 n / bandwidth. The time of the central rank grows with every rank.
#
# </details>
#
# ## Break it
#
# **Predict:** every rank first sends to its right neighbour, then receives from its left one.
# Simulated ranks buffer nothing. What happens?


# %%
def send_first(comm):
    buffer = comm.watch("buffer", np.full(4, comm.contribution))
    comm.send(buffer, to=(comm.rank + 1) % comm.size)
    comm.recv(buffer, source=(comm.rank - 1) % comm.size)


broken = record(send_first, ranks=3)
print(broken.deadlock)
show(broken, frames=2)

# %% [markdown]
# <details><summary>The answer</summary>
#
# Every rank waits for another rank that waits: a deadlock. `comm.exchange` posts the send and the
# receive at the same time; the ring uses it.
#
# </details>
#
# ## Now on real processes
#
# The same function, under `mpirun`, on four processes of this machine.

# %% tags=["real"]
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import numpy as np, minidist
from minidist.full.collectives import all_reduce

comm = minidist.init()
buffer = np.arange(4.0) + comm.rank
all_reduce(buffer, comm, algorithm="ring")
print(f"rank {comm.rank} of {comm.size}: {buffer}, {comm.traffic.bytes} bytes sent")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "ring.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 4 {file}

# %% [markdown]
# Next: [lesson 02](../lessons/02_ring_all_reduce/README.md), where you write it yourself.

# %% [markdown]
# # 01 · Ranks and messages
#
# Four ranks have a number each. Rank 0 receives the others' numbers, adds them up, and sends the
# total back. A colour shows whose numbers an array holds. Step through it with the arrow keys
# (click into the player first).

# %%
import sys
import time

import numpy as np

import minidist
from minidist import Cluster
from minidist.draw.notebook import show
from minidist.draw.recording import record


def add_up_on_rank_0(comm):
    total = comm.watch("total", np.array([comm.contribution]))
    if comm.rank > 0:
        comm.send(total, to=0)
        comm.recv(total, source=0)
        return
    arriving = np.zeros_like(total)
    for source in range(1, comm.size):
        comm.recv(arriving, source)
        total += arriving
    for other in range(1, comm.size):
        comm.send(total, to=other)


show(record(add_up_on_rank_0, ranks=4))

# %% [markdown]
# Every row is a *rank*: a copy of the same program with memory of its own. All four run the
# function above; only `comm.rank` differs. No rank can read the total of another rank: it gets the
# total in a message. Rank 0 receives from one rank after the other, so rank 3 waits longest.
#
# ## Whose variable is it?
#
# **Predict:** every rank has an array with its own rank in it. Rank 0 sends to rank 2. What do the
# four arrays hold then?


# %%
def one_message(comm):
    number = np.array([float(comm.rank)])
    if comm.rank == 0:
        comm.send(number, to=2)
    if comm.rank == 2:
        comm.recv(number, source=0)
    return number.item()


print(minidist.run(one_message, ranks=4))

# %% [markdown]
# <details><summary>The answer</summary>
#
# A copy of rank 0's number is in rank 2's array. Ranks 1 and 3 took neither branch, so they sent
# and received nothing.
#
# </details>
#
# ## Who is first?
#
# **Predict:** rank 0 sleeps, rank 1 does not. Each rank notes when it comes to a line and when it
# goes on. In which order are the notes? And in which order if there is a barrier in that line?


# %%
def note_order(comm, notes, barrier):
    if comm.rank == 0:
        time.sleep(0.2)
    notes.append(f"rank {comm.rank} comes")
    if barrier:
        comm.barrier()
    notes.append(f"rank {comm.rank} goes on")


without, behind = [], []
minidist.run(lambda comm: note_order(comm, without, barrier=False), ranks=2)
minidist.run(lambda comm: note_order(comm, behind, barrier=True), ranks=2)
print(without, behind[:2], sorted(behind[2:]), sep="\n")

# %% [markdown]
# <details><summary>The answer</summary>
#
# Without a message between them, two ranks have no order: the sleep decides, or whatever else the
# machine is doing. With the barrier, no rank goes on before both have come. Either rank may go on
# first, so the last line is sorted here.
#
# </details>
#
# ## Which messages fit?
#
# **Predict:** rank 0 sends three doubles. Rank 1 receives into an array of four, of which it
# expects three to be filled. What happens?


# %%
def wrong_size(comm):
    if comm.rank == 0:
        comm.send(np.ones(3), to=1)
    else:
        comm.recv(np.zeros(4), source=0)


try:
    minidist.run(wrong_size, ranks=2)
except RuntimeError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# A message does not carry its shape; both ranks have to know it. MPI would fill three elements
# without an error.
#
# </details>
#
# **Predict:** rank 0 sends 1.0 and then 2.0, with tags 7 and 8. Rank 1 receives tag 8 first. What
# does it get?


# %%
def by_tag(comm):
    if comm.rank == 0:
        for request in [
            comm.isend(np.array([1.0]), 1, tag=7),
            comm.isend(np.array([2.0]), 1, tag=8),
        ]:
            request.wait()
        return None
    first, second = np.empty(1), np.empty(1)
    comm.recv(first, 0, tag=8)
    comm.recv(second, 0, tag=7)
    return first.item(), second.item()


print(minidist.run(by_tag, ranks=2)[1])

# %% [markdown]
# <details><summary>The answer</summary>
#
# A receive takes the message with its tag; messages with one tag arrive in the order of sending. If
# rank 0 used `send` instead of `isend`, it would wait until tag 7 is received, while rank 1 waits
# for tag 8: a deadlock.
#
# </details>
#
# ## Break it
#
# **Predict:** every rank sends to its right, then receives from its left. On simulated ranks a send
# waits for its receive.


# %%
def send_first(comm):
    token = comm.watch("token", np.array([comm.contribution]))
    arriving = comm.watch("arriving", np.zeros_like(token))
    comm.send(token, to=(comm.rank + 1) % comm.size)
    comm.recv(arriving, source=(comm.rank - 1) % comm.size)


broken = record(send_first, ranks=4)
print(broken.deadlock)
show(broken, frames=2)

# %% [markdown]
# <details><summary>The answer</summary>
#
# A deadlock: every rank waits for the next one in the ring.
#
# </details>
#
# Now let small messages be buffered, as MPI and networks do.
#
# **Predict:** sends of up to 64 bytes do not wait. Does the same program run with 1 number? With
# 100?


# %%
def sized(comm, elements):
    comm.send(np.ones(elements), to=(comm.rank + 1) % comm.size)
    comm.recv(np.empty(elements), source=(comm.rank - 1) % comm.size)


lines = []
for elements in (1, 100):
    try:
        minidist.run(lambda comm, n=elements: sized(comm, n), ranks=4, eager_limit=64)
        lines.append(f"{elements} numbers: all came through")
    except minidist.DeadlockError as error:
        lines.append(f"{elements} numbers: {str(error).splitlines()[-1].strip()}")
print("\n".join(lines))

# %% [markdown]
# <details><summary>The answer</summary>
#
# With small test data the program runs, so tests do not find such a mistake.
#
# </details>
#
# The repair: post the send and the receive at the same time.


# %%
def exchange(comm):
    token = comm.watch("token", np.array([comm.contribution]))
    arriving = comm.watch("arriving", np.zeros_like(token))
    comm.exchange(token, (comm.rank + 1) % comm.size, arriving, (comm.rank - 1) % comm.size)


show(record(exchange, ranks=4), frames=2)

# %% [markdown]
# ## How long does a chain take?
#
# **Predict:** rank 0's megabyte has to get to 8 ranks along a chain, on a cluster with 1 GB/s and
# 10 µs per message. As one message, that takes 7 hops of about 1 ms. How long does it take in
# pieces, if each rank passes a piece on before the next one comes? Compare `recv` and `send` in
# turn with all receives posted ahead.


# %%
def chain(comm, pieces, ahead):
    cut = np.array_split(np.zeros(125_000), pieces)  # 1 MB
    posted = [comm.irecv(piece, comm.rank - 1) for piece in cut] if ahead and comm.rank > 0 else []
    for number, piece in enumerate(cut):
        if posted:
            posted[number].wait()
        elif comm.rank > 0:
            comm.recv(piece, comm.rank - 1)
        if comm.rank < comm.size - 1:
            comm.send(piece, comm.rank + 1)
    return comm.clock()


lines = ["pieces   recv, send in turn   receives posted ahead"]
for pieces in (1, 10, 100, 1000):
    milliseconds = []
    for ahead in (False, True):
        cluster = Cluster.uniform(latency=10e-6, bandwidth=1e9)
        times = minidist.run(
            lambda comm, n=pieces, ahead=ahead: chain(comm, n, ahead), ranks=8, cluster=cluster
        )
        milliseconds.append(1000 * max(times))
    lines.append(f"{pieces:6} {milliseconds[0]:17.3f} ms {milliseconds[1]:20.3f} ms")
print("\n".join(lines))

# %% [markdown]
# <details><summary>The answer</summary>
#
# With pieces, all links work at the same time, as in a pipeline. If the receives are posted ahead,
# a piece can arrive while the piece before it is sent on: (P − 1) · latency + (P + k − 2) · n/(k ·
# bandwidth). With `recv` and `send` in turn, a rank does only one of the two at a time, and a piece
# that finds no receive has to wait. Then each piece also costs a latency, and too many pieces are
# slower than few.
#
# </details>
#
# ## Now on real processes
#
# Four processes of this machine, under `mpirun`. Each prints its line when it gets there.

# %% tags=["real"]
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import numpy as np, minidist

comm = minidist.init()
token, right, left = np.array([float(comm.rank)]), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
arriving = np.empty(1)
comm.exchange(token, right, arriving, left)
print(f"rank {comm.rank} of {comm.size}: my left neighbour sent {arriving[0]}")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "ring.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 4 {file}

# %% [markdown]
# Next: [lesson 01](../lessons/01_ranks/README.md), where you write five such programs yourself.

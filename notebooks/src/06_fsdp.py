# %% [markdown]
# # 06 · Fully sharded data parallelism
#
# A rank owns a quarter of the parameters of every unit, and gathers the rest while it computes with
# them. Here is the life of one unit: the ranks gather it, free it, and sum its gradients for the
# owners of the shards. A colour shows whose numbers a cell holds.

# %%
import sys

import numpy as np
import torch
from torch import nn

import minidist
from minidist import Cluster, Trace
from minidist.draw.notebook import picture, show
from minidist.draw.recording import record
from minidist.full import DDP, FSDP, MixedPrecision
from minidist.full.collectives import all_gather, reduce_scatter
from minidist.further import ZeROPlusPlus


def one_unit(comm):
    whole = comm.watch("parameters", np.zeros(8), cells=comm.size)
    shard = np.full(2, float(comm.contribution))
    all_gather(shard, comm, out=whole, algorithm="ring")
    whole[:] = 0  # used, and freed
    gradient = comm.watch("gradients", np.full(8, float(comm.contribution)), cells=comm.size)
    mine = comm.watch("its shard", np.zeros(2))
    mine[:] = reduce_scatter(gradient, comm, algorithm="ring")


show(record(one_unit, ranks=4), frames=4)

# %% [markdown]
# After the first half every rank has all four parts of the parameters. Then the parameters are
# freed, and each rank has the gradients of its own rows. At the end each rank has the sum of one
# part of the gradients.
#
# ## What is sent?
#
# **Predict:** DDP sends 2 (P − 1)/P of the parameters' bytes. FSDP gathers twice and
# reduce-scatters once. How much is that? And without freeing after forward?


# %%
def blocks(count=5, width=64, dtype=torch.float64):
    return nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(count)))


def step(model, width=64, dtype=torch.float64):
    model(torch.ones(4, width, dtype=dtype)).sum().backward()


def sent(comm, wrap, **options):
    model = wrap(blocks(), comm, op="sum", **options)
    before = comm.traffic.bytes
    step(model)
    return comm.traffic.bytes - before


whole = sum(parameter.nbytes for parameter in blocks().parameters())
for wrap, options in ((DDP, {}), (FSDP, {}), (FSDP, {"reshard_after_forward": False})):
    bytes = minidist.run(
        lambda comm, wrap=wrap, options=options: sent(comm, wrap, **options), ranks=4
    )[0]
    print(f"{wrap.__name__:5} {options or ''!s:32} {bytes:7} bytes = {bytes / whole:.3f} n")

# %% [markdown]
# <details><summary>The answer</summary>
#
# 3/4 · 2 n, 3/4 · 3 n, and 3/4 · 2 n again.
#
# </details>
#
# ## How many units are whole?
#
# **Predict:** five units. While unit 2 computes in forward, which are whole? And in backward?


# %%
def whole_units(comm):
    model, seen = FSDP(blocks(), comm, op="sum"), []
    step(model)  # in the first forward nobody knows which unit comes next
    for layer in model.module:

        def look(*_):
            whole = model.window.unsharded
            seen.append("".join("■" if unit in whole else "·" for unit in model.units[:-1]))

        layer.register_forward_pre_hook(look)
        layer.weight.register_post_accumulate_grad_hook(look)
    step(model)
    return seen


seen = minidist.run(whole_units, ranks=2)[0]
for number in range(5):
    print(
        f"forward of unit {number}: {seen[number]}        backward of unit {4 - number}: "
        f"{seen[5 + number]}"
    )

# %% [markdown]
# <details><summary>The answer</summary>
#
# Two units: one in use, and one that is being gathered. Of all other units a rank holds only its
# shards.
#
# </details>
#
# ## Is the gathering hidden?
#
# A modelled cluster: four ranks, 50 GB/s each, four units of two matrices of 64 MiB. Computing
# takes the time that we choose; the package's FSDP runs on tensors without data.
#
# **Predict:** to gather 128 MiB takes 2 ms. Is a forward of 1 ms a unit enough to hide it? Of 4 ms?


# %%
class Work(torch.autograd.Function):
    """Takes a time in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx, x, comm, unit, seconds):
        ctx.known = comm, unit, seconds
        with comm.span(f"forward {unit}"):
            comm.advance(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        comm, unit, seconds = ctx.known
        with comm.span(f"backward {unit}"):
            comm.advance(2 * seconds)
        return gradient, None, None, None


class Block(nn.Module):
    def __init__(self, comm, unit, seconds):
        super().__init__()
        self.known = comm, unit, seconds / 2
        self.up, self.down = (nn.Linear(4096, 4096, bias=False, device="meta") for _ in range(2))

    def forward(self, x):
        return Work.apply(self.down(Work.apply(self.up(x), *self.known)), *self.known)


def second_step(comm, seconds):
    model = FSDP(nn.Sequential(*(Block(comm, unit, seconds) for unit in range(4))), comm, op="sum")
    for _ in range(2):
        begin = comm.clock()
        model(torch.empty(1, 4096, device="meta")).sum().backward()
        model.stepped()
    return begin, comm.clock()


def timeline(seconds):
    trace = Trace()
    cluster = Cluster.uniform(latency=1e-5, bandwidth=50e9)
    times = minidist.run(
        lambda comm: second_step(comm, seconds), ranks=4, cluster=cluster, trace=trace
    )
    return trace, *times[0]


runs = {milliseconds: timeline(milliseconds / 1000) for milliseconds in (1, 4)}
for milliseconds, (_, begin, end) in runs.items():
    computing = 4 * 3 * milliseconds
    print(f"{milliseconds} ms a unit: computing {computing} ms, step {1000 * (end - begin):.3f} ms")


# %%
def draw(file):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    kinds = {
        "forward": "#0072B2",
        "backward": "#009E73",
        "all_gather": "#E69F00",
        "reduce_scatter": "#CC79A7",
    }
    for panel, (milliseconds, (trace, begin, end)) in zip(
        figure.subplots(2, 1), runs.items(), strict=True
    ):
        for event in trace.events:
            kind = event.name.split()[0]
            if event.rank == 0 and event.start >= begin - 1e-9 and kind in kinds:
                row = 1 if event.kind == "compute" else 0
                place = (1000 * (event.start - begin), 1000 * (event.end - event.start))
                panel.broken_barh(
                    [place], (row - 0.4, 0.8), facecolor=kinds[kind], edgecolor="white"
                )
        panel.set_yticks([0, 1], ["stream", "compute"])
        panel.set_title(
            f"{milliseconds} ms of forward a unit: the step takes {1000 * (end - begin):.1f} ms",
            fontsize=10,
        )
    panel.set_xlabel("time (ms)")
    handles = [figure.axes[0].barh(0, 0, color=colour) for colour in kinds.values()]
    figure.legend(handles, list(kinds), loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(file, dpi=110)


picture(
    draw,
    "Computing and communication of a step, twice. With 1 ms of forward a unit, the stream is "
    "busy throughout and computing has gaps: 26.5 ms. With 4 ms, computing is busy but for one "
    "gap, and communication fits beside it: 54.1 ms.",
)

# %% [markdown]
# Above, computing waits for each all-gather. Below, computing hides all communication except three
# parts, during which there is nothing to compute: the first all-gather of forward, the all-gather
# of the last unit in backward (this code frees the last unit like all others; PyTorch keeps it),
# and the last reduce-scatter.
#
# ## What crosses from node to node?
#
# **Predict:** four ranks on two nodes, weights in 16 bits. What part of all parameters' bytes
# crosses between the nodes in one step: sharded over all ranks, hybrid, and with ZeRO++?


# %%
def crossing(comm):
    messages = [
        event for event in comm.trace.events if event.rank == comm.rank and event.kind == "send"
    ]
    return sum(
        event.bytes for event in messages if comm.rank // 2 != int(event.name.split()[-1]) // 2
    )


def between_nodes(comm, wrap, options):
    bits = MixedPrecision(torch.bfloat16)
    model = wrap(blocks(4, 256, torch.float32), comm, op="sum", precision=bits, **options)
    before = crossing(comm)
    step(model, 256, torch.float32)
    return crossing(comm) - before


for wrap, options in ((FSDP, {}), (FSDP, {"shard_ranks": 2}), (ZeROPlusPlus, {"node_ranks": 2})):
    run = lambda comm, wrap=wrap, options=options: between_nodes(comm, wrap, options)  # noqa: E731
    bytes = sum(minidist.run(run, ranks=4, trace=Trace()))
    print(f"{wrap.__name__:12} {options or ''!s:18} {bytes / (4 * 256 * 256 * 2):.3f} n")

# %% [markdown]
# <details><summary>The answer</summary>
#
# With hybrid sharding only sums of gradients cross between nodes, but here it takes twice the
# memory. ZeRO++ sends fewer bits.
#
# </details>
#
# ## Break it
#
# **Predict:** we try to free the weights by assigning a new `parameter.data`. How many bytes of
# weights are alive after forward? And what happens in backward if we free their storage and do not
# gather again?

# %%
import weakref


def alive(free):
    layer = nn.Linear(64, 64, bias=False, dtype=torch.float64)
    storage = weakref.ref(layer.weight.untyped_storage())
    # autograd saves the weights
    loss = layer(torch.ones(1, 64, dtype=torch.float64, requires_grad=True)).sum()
    free(layer.weight)
    left = storage()
    message = f"{left.nbytes() if left is not None else 0:5} bytes of weights after forward"
    try:
        loss.backward()
    except RuntimeError as error:
        message += f"; then backward says\n  {error}"
    return message


def let_go(weight):
    weight.data = torch.zeros(1, dtype=weight.dtype).expand(weight.shape)


def resize(weight):
    weight.untyped_storage().resize_(0)


print("let go :", alive(let_go))
print("resized:", alive(resize))

# %% [markdown]
# <details><summary>The answer</summary>
#
# Autograd keeps the weights that it has saved, so a new `parameter.data` frees nothing. Freeing the
# storage does free the memory, but then backward finds no numbers there. So FSDP gathers into *the
# same* storage before backward needs it.
#
# </details>
#
# ## Now on real processes

# %% tags=["real"]
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import torch, minidist
from torch import nn
from minidist.full import FSDP

comm = minidist.init()
model = FSDP(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), comm, op="sum")
loss = model(torch.ones(2, 64)).square().mean()
loss.backward()
held = sum(flat.mine.nbytes for flat in model.flats)
print(f"rank {comm.rank} of {comm.size}: holds {held} of {sum(p.nbytes for p in model.parameters())} bytes")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "sharded.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 4 {file}

# %% [markdown]
# Next: [lesson 06](../lessons/06_fsdp/README.md), where you write it yourself.

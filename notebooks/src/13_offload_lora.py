# %% [markdown]
# # 13 · Offload, LoRA, QLoRA
#
# The account shows the memory that one training step of a small GPT takes, in four cases: the whole
# model is trained; the same with the optimizer state elsewhere; with adapters; and with adapters
# beside weights of four bits. Grey bytes are held, but not in fast memory.

# %%
import sys

import matplotlib.pyplot as plt
import numpy as np
import torch

import minidist
from minidist.draw.notebook import picture, show
from minidist.draw.recording import record
from minidist.full import DDP
from minidist.full.adapters import EVERY_MATRIX, LoRALinear, add_lora
from minidist.full.memory.account import Account
from minidist.full.memory.offload import OffloadedOptimizer
from minidist.full.model import GPT, GPTConfig, cross_entropy_sum
from minidist.further import add_qlora
from minidist.further.nf4.nf4 import dequantize, levels, quantize

CONFIG = GPTConfig(vocabulary=64, layers=2, hidden=256, heads=4, sequence=16)
TOKENS = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))


def loss_of(model):
    return cross_entropy_sum(model(TOKENS[:, :-1]), TOKENS[:, 1:]) / 32


def held(prepare):
    """Bytes by category after a training step."""
    model, account = GPT(CONFIG), Account()
    prepare(model)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
    account.watch(model, optimizer)
    loss_of(model).backward()
    optimizer.step()
    return account.sample()


WAYS = {
    "full": held(lambda model: None),
    "LoRA": held(lambda model: add_lora(model, rank=4, targets=EVERY_MATRIX)),
    "QLoRA": held(lambda model: add_qlora(model, rank=4, targets=EVERY_MATRIX)),
}


def draw_ways(file):
    bars = {
        "full": WAYS["full"],
        "full,\noffloaded": WAYS["full"],
        "LoRA": WAYS["LoRA"],
        "QLoRA": WAYS["QLoRA"],
    }
    figure, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
    for place, (name, found) in enumerate(bars.items()):
        bottom = 0.0
        for kind, colour in (
            ("parameters", "#0072B2"),
            ("gradients", "#009E73"),
            ("optimizer", "#56B4E9"),
        ):
            away = "offloaded" in name and kind == "optimizer"
            size = found[kind] / 2**20
            label = kind if place == 0 else None
            axes.bar(
                place,
                size,
                bottom=bottom,
                color="#DDDDDD" if away else colour,
                width=0.6,
                label=label,
            )
            bottom += size
    axes.set_xticks(range(len(bars)), bars)
    axes.set_ylabel("held after a step (MiB)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)
    plt.close(figure)


picture(
    draw_ways,
    "MiB held after a step. Full training holds 25: half of it optimizer, which offloading moves "
    "away. LoRA holds 7, nearly all parameters; QLoRA 1.5.",
)

# %%
for name, found in WAYS.items():
    print(
        f"{name:6}",
        *(f"{kind} {found[kind]:10,}  " for kind in ("parameters", "gradients", "optimizer")),
    )

# %% [markdown]
# ## How does an adapter start?
#
# y = W x + s·B A x. B is zero, A is drawn.
#
# **Predict:** in the first step, which of the two gets a gradient? And in the second?

# %%
model = GPT(CONFIG, dtype=torch.float64)
before = model(TOKENS[:, :-1])
add_lora(model, rank=4, targets=("query",))
print("the same output as before, to the last bit:", torch.equal(model(TOKENS[:, :-1]), before))
adapter = next(module for module in model.modules() if isinstance(module, LoRALinear))
optimizer = torch.optim.SGD(
    [parameter for parameter in model.parameters() if parameter.requires_grad], lr=10.0
)
for step in (1, 2, 3):
    optimizer.zero_grad()
    loss_of(model).backward()
    norms = adapter.A.grad.norm().item(), adapter.B.grad.norm().item()
    print(f"step {step}: gradient of A {norms[0]:.6f}, of B {norms[1]:.6f}")
    optimizer.step()

# %% [markdown]
# <details><summary>The answer</summary>
#
# The gradient of A is Bᵀ times something, and B is zero at first. If A were zero as well, nothing
# would ever move.
#
# </details>
#
# ## What do the ranks send?
#
# **Predict:** for 6.5 MB of gradients, each of four ranks sends 3/2 of these bytes. How much does
# it send with adapters of rank 4?


# %%
def traffic(comm, rank):
    model = GPT(CONFIG)
    if rank:
        add_lora(model, rank, targets=EVERY_MATRIX)
    wrapped, before = DDP(model, comm, op="sum"), comm.traffic.bytes
    cross_entropy_sum(wrapped(TOKENS[:, :-1]), TOKENS[:, 1:]).backward()
    return comm.traffic.bytes - before


for rank in (0, 1, 4, 16):
    sent = minidist.run(lambda comm, rank=rank: traffic(comm, rank), ranks=4)
    print(
        f"{f'adapters of rank {rank}' if rank else 'all trained':20} {sent[0]:10,} bytes from "
        "rank 0"
    )

# %% [markdown]
# <details><summary>The answer</summary>
#
# The bytes are proportional to the rank of the adapters. DDP needs no setting for this: it reduces
# only the gradients of parameters that are not frozen.
#
# </details>
#
# Here is DDP with a single matrix W of 4 times 4 numbers and an adapter of rank 1, on two ranks. A and
# B are set so that each of their gradients is its rank's colour. W has no gradient, and nobody sends it.


# %%
def adapters_alone(comm):
    base = torch.nn.Linear(4, 4, bias=False, dtype=torch.float64).requires_grad_(False)
    layer = LoRALinear(base, base.weight, rank=1, alpha=1)
    with torch.no_grad():
        base.weight.zero_()
        layer.A.fill_(0.25)
        layer.B.fill_(0.25)
    model = DDP(layer, comm, op="sum", equal=True)
    comm.watch("W, frozen", base.weight.detach(), cells=4)
    comm.watch("gradients of B, A", model.reducer.buckets[0].flat, cells=4)
    loss = model(torch.ones(4, dtype=torch.float64)).sum() * float(comm.contribution)
    loss.backward()


show(
    record(
        adapters_alone,
        ranks=2,
        formulas={"bytes sent": "2 (P − 1)/P · 8 r (in + out) = 2 · 1/2 · 64; W would add 128"},
    ),
    frames=3,
)

# %% [markdown]
# ## Sixteen values for a weight
#
# Below are some 130,000 weights, each divided by the largest of its block of 64, and the sixteen
# levels of NF4.
#
# **Predict:** where should levels stand close to each other?

# %%
WEIGHTS = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0))
BLOCKS = WEIGHTS.view(-1, 64)


def draw_levels(file):
    figure, axes = plt.subplots(figsize=(7.5, 2.8), layout="constrained")
    scaled = (BLOCKS / BLOCKS.abs().amax(dim=1, keepdim=True)).flatten().numpy()
    axes.hist(scaled, bins=101, range=(-1, 1), color="#56B4E9")
    for number, level in enumerate(levels()):
        axes.axvline(
            level, color="#D55E00", linewidth=1.2, label=None if number else "levels of NF4"
        )
    axes.set_xlabel("weight / largest of its block")
    axes.set_ylabel("weights")
    axes.legend(framealpha=1, edgecolor="white", loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)
    plt.close(figure)


picture(
    draw_levels,
    "A histogram of weights, each divided by the largest of its block, and the sixteen levels of "
    "NF4",
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# The weights form a bell around zero, with a spike at -1 and at 1. The levels stand close together
# in the middle, and farther apart outside.
#
# Where the weights are. The levels are quantiles: about as many weights between any two. (At ±1
# there are many: in every block the largest is one of the two.)
#
# </details>
#
# **Predict:** one weight in a thousand is made 20 times as large. How does the error of the
# *others* change if 64 weights share a scale? And if all weights share one?


# %%
def error(weights, scale):
    """Root of the mean square error of even steps from -7 to 7, of weights that are not
    outliers.
    """
    rounded = (weights / scale * 7).round() / 7 * scale
    return root(rounded - weights)


def root(difference):
    return difference[ordinary].square().mean().sqrt().item()


for outliers in (False, True):
    found, ordinary = BLOCKS.clone(), torch.ones(BLOCKS.shape, dtype=torch.bool)
    if outliers:
        found.view(-1)[::1000] *= 20
        ordinary.view(-1)[::1000] = False
    own = found.abs().amax(dim=1, keepdim=True)
    print("with outliers" if outliers else "normal weights")
    print(f"    even steps, one scale      {error(found, found.abs().max()):.6f}")
    print(f"    even steps, a scale for 64 {error(found, own):.6f}")
    print(
        "    NF4                        "
        f"{root(dequantize(quantize(found)).view(-1, 64) - found):.6f}"
    )
packed = quantize(WEIGHTS)
print(f"{8 * packed.nbytes / len(WEIGHTS):.6f} bits for a weight")

# %% [markdown]
# <details><summary>The answer</summary>
#
# An outlier spoils its own block, not the tensor. That is what a scale for every 64 weights is for,
# and it would cost half a bit in float32; quantised again, it costs an eighth.
#
# </details>
#
# ## In which order do the pieces come?
#
# The optimizer's state lives elsewhere and comes a piece at a time.
#
# **Predict:** one piece is transferred while another is updated, and at most two pieces are in fast
# memory. In which order are four pieces fetched and kept?


# %%
class Logged(OffloadedOptimizer):
    """Writes down when the state of a parameter comes and goes."""

    def state_of(self, parameter):
        log.append(("fetch", parameters.index(parameter)))
        return super().state_of(parameter)

    def _store(self, parameter, state):
        log.append(("keep", parameters.index(parameter)))
        super()._store(parameter, state)


parameters, log = [torch.nn.Parameter(torch.tensor(float(i))) for i in range(4)], []
for parameter in parameters:
    parameter.grad = torch.ones(())
Logged(parameters, chunk_bytes=1).step()
print(", ".join(f"{verb} {piece}" for verb, piece in log))


def schedule(log, travel=1.0, update=1.6):
    """Return (row, piece, start, end) of each thing done: the wire in the order of the log, updates
    when they can.
    """
    rows, wire, compute, here, done = [], 0.0, 0.0, {}, {}
    for verb, piece in log:
        if verb == "keep" and piece not in done:
            start = max(compute, here[piece])
            compute = done[piece] = start + update
            rows.append(("update", piece, start, compute))
        start = max(wire, done[piece]) if verb == "keep" else wire
        wire = start + travel
        if verb == "fetch":
            here[piece] = wire
        rows.append((verb, piece, start, wire))
    return rows


ONE_BY_ONE = [(verb, piece) for piece in range(4) for verb in ("fetch", "keep")]
COLOURS = {"fetch": "#56B4E9", "keep": "#CC79A7", "update": "#E69F00"}


def draw_schedules(file):
    figure, panels = plt.subplots(2, 1, figsize=(7.5, 3.0), sharex=True, layout="constrained")
    for panel, order, title in zip(
        panels, (ONE_BY_ONE, log), ("one by one", "read ahead by one"), strict=True
    ):
        for verb, piece, start, end in schedule(order):
            height = 1 if verb == "update" else 0
            panel.barh(height, end - start, left=start, color=COLOURS[verb], edgecolor="white")
            panel.text(
                (start + end) / 2, height, f"{verb} {piece}", ha="center", va="center", fontsize=7
            )
        panel.set_yticks((0, 1), ("wire", "compute"))
        panel.set_title(title, fontsize=9, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("time (travel 1, update 1.6)")
    figure.savefig(file, dpi=130)
    plt.close(figure)


picture(draw_schedules, "Computing and the wire for four buckets, one by one and read ahead by one")

# %%
for name, order in ("one by one", ONE_BY_ONE), ("read ahead by one", log):
    print(f"{name:18} {max(end for *_, end in schedule(order)):.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# One by one, each bucket is fetched, updated and kept before the next is fetched, up to 14.4. Read
# ahead by one, the next is fetched during the update, and all is done at 9.2.
#
# </details>
#
# ## Break it: adapters after DDP
#
# **Predict:** DDP wraps the model, and only then we add the adapters. Who reduces the gradients of
# the adapters?


# %%
def too_late(comm):
    wrapped = DDP(GPT(CONFIG), comm, op="sum")
    try:
        add_lora(wrapped.module, rank=4)
    except ValueError as error:
        return str(error)
    return "nobody noticed"


print(minidist.run(too_late, ranks=2)[0])

# %% [markdown]
# <details><summary>The answer</summary>
#
# Without this error nobody would, and the ranks would drift apart silently. So add the adapters
# first, then wrap the model in DDP, then make the optimizer.
#
# </details>
#
# ## Now on real processes
#
# QLoRA with DDP on two processes of this machine, each with its own text; the state of AdamW lies
# in files.

# %% tags=["real"]
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import tempfile, torch, minidist
from pathlib import Path
from minidist.full.adapters import EVERY_MATRIX
from minidist.further import add_qlora
from minidist.full.memory.offload import OffloadedOptimizer
from minidist.full.model import GPT, GPTConfig, cross_entropy_sum
from minidist.full import DDP

comm = minidist.init()
model = GPT(GPTConfig(vocabulary=64, layers=2, hidden=128, heads=4, sequence=16))
add_qlora(model, rank=4, targets=EVERY_MATRIX)
wrapped = DDP(model, comm, op="mean")
tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(comm.rank))
with tempfile.TemporaryDirectory() as folder:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = OffloadedOptimizer(trained, torch.optim.AdamW, to=Path(folder), lr=0.005)
    for step in range(3):
        wrapped.zero_grad()
        loss = cross_entropy_sum(wrapped(tokens[:, :-1]), tokens[:, 1:]) / 32
        loss.backward()
        optimizer.step()
        if comm.rank == 0:
            print(f"step {step}: loss of rank 0 {loss.item():.4f}")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "qlora.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 2 {file}

# %% [markdown]
# Next: [lesson 13](../lessons/13_offload_lora/README.md), where you write it yourself.

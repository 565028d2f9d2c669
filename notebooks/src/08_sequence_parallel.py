# %% [markdown]
# # 08 · Sequence parallelism
#
# A region of tensor parallelism ends in an all-reduce. Take it apart: a reduce-scatter leaves each
# rank its own tokens of the sum; it works on them alone; an all-gather brings all tokens together
# when the next region begins.

# %%
import sys

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.autograd.graph import saved_tensors_hooks

import minidist
from minidist.draw.notebook import picture, show
from minidist.draw.recording import record
from minidist.full import adjoint, parallelize_tensor, vocabulary_parallel_cross_entropy_sum
from minidist.full.collectives import all_gather, reduce_scatter
from minidist.full.model import GPT, GPTConfig

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # of ranks 0 to 3 (Okabe & Ito 2008)


def between_regions(comm):
    terms = comm.watch("terms", np.full(3, comm.contribution), cells=3)
    own = comm.watch("own token", reduce_scatter(terms, comm, algorithm="ring"))
    # here stands the norm
    tokens = comm.watch("all tokens", np.zeros(3, dtype=terms.dtype), cells=3)
    all_gather(own, comm, out=tokens, algorithm="ring")


show(
    record(between_regions, ranks=3, formulas={"bytes sent": "2 (P − 1)/P · n = 2 · 2/3 · 24 = 32"})
)

# %% [markdown]
# Three ranks, three tokens. After the first half, rank r holds the complete sum of token r, and of
# no other token. Norm, dropout and residual need only this.
#
# ## What does it cost?
#
# **Predict:** a GPT of 2 layers on 4 ranks, with and without `sequence=True`. Two collectives in
# place of one: how much more is sent, and how much less is kept for backward?

# %%
config = GPTConfig(vocabulary=64, layers=2, hidden=64, heads=8, intermediate=64, sequence=64)
generator = torch.Generator().manual_seed(0)
batch = torch.randint(64, (2, 65), generator=generator)


def step(comm, sequence):
    model = GPT(config, dtype=torch.float64)
    parallelize_tensor(model, comm, sequence=sequence)
    # these are there anyway
    kept = {weight.untyped_storage().data_ptr(): 0 for weight in model.parameters()}

    def keep(tensor):
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    before = comm.traffic.bytes
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(batch[:, :-1])
        loss = vocabulary_parallel_cross_entropy_sum(logits, batch[:, 1:], comm, 64) / 128
    forward = comm.traffic.bytes - before
    loss.backward()
    return (
        f"{loss.item():.6f}",
        forward,
        comm.traffic.bytes - before - forward,
        sum(kept.values()),
    )


for sequence in (False, True):
    loss, forward, backward, kept = minidist.run(lambda comm, on=sequence: step(comm, on), ranks=4)[
        0
    ]
    name = "sequence" if sequence else "tensor"
    print(f"{name:9} loss {loss}   sent {forward:,} + {backward:,}   kept {kept:,}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# In forward, a rank sends the same number of bytes. The 5120 additional bytes in backward are for
# the norms; a section below explains them.
#
# </details>
#
# **Predict:** what is kept, for more ranks. Tensor parallelism alone divides what lies inside the
# regions. To what does its curve tend? And with the sequence split?

# %%
widths = (1, 2, 4, 8)
curves = {
    name: [minidist.run(lambda comm, on=on: step(comm, on), ranks=p)[0][3] for p in widths]
    for name, on in (("tensor", False), ("tensor and sequence", True))
}
for name, bytes in curves.items():
    print(f"{name:20}", *(f"{each:10,}" for each in bytes))


def draw_kept(file):
    figure = Figure(figsize=(6, 2.8), layout="constrained")
    axes = figure.subplots()
    for (name, bytes), colour in zip(curves.items(), COLOURS[1::-1], strict=True):
        axes.plot(range(4), [each / 2**20 for each in bytes], "o-", color=colour, label=name)
    axes.set_xticks(range(4), [str(p) for p in widths])
    axes.set_xlabel("ranks")
    axes.set_ylabel("MiB kept for backward\n(of one rank)")
    axes.set_ylim(0, None)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)


picture(
    draw_kept, "MiB kept for backward by one rank, on 1, 2, 4 and 8 ranks, a curve for each way"
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# With tensor parallelism 2.2 MiB fall to 1.1 only; with sequence parallelism as well they fall to
# 0.5.
#
# What still does not shrink is the gathered input of each region, kept for the gradients of its
# weights. Megatron keeps the slice and gathers once more in backward.
#
# </details>
#
# ## Who knows a norm's gradient?
#
# **Predict:** a norm's weight is whole on every rank and used on a quarter of the tokens. Is its
# gradient on rank 0 the serial one, a quarter of it, or something else?

# %%
x = torch.randn(8, 3, dtype=torch.float64, generator=generator)
A = torch.randn(3, 4, dtype=torch.float64, generator=generator)


def norm_gradient(comm):
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    every = adjoint.all_gather(x.chunk(comm.size)[comm.rank] * weight, comm, dim=0, size=8)
    (every @ A.chunk(comm.size, dim=1)[comm.rank]).square().sum().backward()
    return weight.grad


terms = minidist.run(norm_gradient, ranks=4)
for name, term in [
    *((f"rank {rank}", term) for rank, term in enumerate(terms)),
    ("sum", sum(terms)),
]:
    print(f"{name:7}", *(f"{number:11.6f}" for number in term.tolist()))
print(
    "serial ", *(f"{number:11.6f}" for number in minidist.run(norm_gradient, ranks=1)[0].tolist())
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# It has the terms of the rank's own tokens, which is no simple fraction of the serial gradient. The
# ranks have to add these terms: one small all-reduce for each norm.
#
# </details>
#
# ## Break it
#
# **Predict:** the norm's gradient is not summed. What do the ranks' copies of one weight look like
# after ten steps?


# %%
def train(comm, add_up):
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for _ in range(10):
        own = x.chunk(comm.size)[comm.rank] * (adjoint.copy_to(weight, comm) if add_up else weight)
        every = adjoint.all_gather(own, comm, dim=0, size=8)
        (every @ A.chunk(comm.size, dim=1)[comm.rank]).square().sum().backward()
        weight.data -= 0.002 * weight.grad
        weight.grad = None
    return f"{weight[0].item():.6f}"


print("summed:    ", minidist.run(lambda comm: train(comm, True), ranks=4))
print("forgotten: ", minidist.run(lambda comm: train(comm, False), ranks=4))
print("serial:    ", minidist.run(lambda comm: train(comm, True), ranks=1))

# %% [markdown]
# <details><summary>The answer</summary>
#
# No error, and four different models. (The sum is lesson 07's f, applied to the weight: identity
# forward, all-reduce backward.)
#
# </details>
#
# **Predict:** what happens with 66 tokens on 4 ranks?

# %%
longer = GPTConfig(vocabulary=64, layers=1, hidden=64, heads=8, intermediate=64, sequence=66)


def too_long(comm):
    model = GPT(longer)
    parallelize_tensor(model, comm, sequence=True)
    model(torch.zeros(1, 66, dtype=torch.int64))


try:
    minidist.run(too_long, ranks=4)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Now on real processes
#
# The step from above, under `mpirun`, on four processes of this machine.

# %% tags=["real"]
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import torch, minidist
from minidist.full.model import GPT, GPTConfig
from minidist.full import parallelize_tensor, vocabulary_parallel_cross_entropy_sum

comm = minidist.init()
model = GPT(GPTConfig(vocabulary=64, layers=2, hidden=64, heads=8, intermediate=64, sequence=64), dtype=torch.float64)
parallelize_tensor(model, comm, sequence=True)
seen = []
model.layers[0].mlp_norm.register_forward_hook(lambda module, inputs, out: seen.append(tuple(out.shape)))
tokens = torch.arange(64).view(1, 64)
loss = vocabulary_parallel_cross_entropy_sum(model(tokens), tokens, comm, 64) / 64
loss.backward()
print(f"rank {comm.rank} of {comm.size}: loss {loss.item():.6f}, the norm saw {seen[0]}")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "sequence.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 4 {file}

# %% [markdown]
# Next: [lesson 08](../lessons/08_sequence_parallel/README.md), where you write it yourself.
# Attention over split tokens is lesson 18.

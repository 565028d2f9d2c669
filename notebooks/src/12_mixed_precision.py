# %% [markdown]
# # 12 · Mixed precision
#
# How far is a number from the nearest one that a format has? Each curve ends where the format has
# no larger number, and rises where it has no smaller ones: that is its range. How low it lies is
# its precision.

# %%
import sys

import numpy as np
import torch

import minidist
from minidist.draw.notebook import picture, show
from minidist.draw.recording import record
from minidist.full.precision import (
    E4M3,
    E5M2,
    LossScaler,
    MasterWeights,
    dequantize,
    quantize,
    scale_for,
    stochastic_round,
)

FORMATS = {
    "float32": (torch.float32, "#000000"),
    "bfloat16": (torch.bfloat16, "#0072B2"),
    "float16": (torch.float16, "#E69F00"),
    "float8 E4M3": (E4M3, "#009E73"),
    "float8 E5M2": (E5M2, "#CC79A7"),
}


def figure_of(rows=1, height=3.4):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, 1, squeeze=False)[:, 0]


def errors(file):
    figure, (panel,) = figure_of()
    exponents = torch.arange(-30, 21, dtype=torch.float64)
    within = torch.rand(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, (dtype, colour) in FORMATS.items():
        # every power of two, and 400 numbers up to the next
        x = torch.exp2(exponents)[:, None] * (1 + within)
        kept = (x <= torch.finfo(dtype).max).all(1)
        worst = ((x.float().to(dtype).double() - x).abs() / x).amax(1)
        panel.plot(exponents[kept], worst[kept], color=colour, label=name, linewidth=2)
    panel.set_yscale("log", base=2)
    panel.set_ylim(2.0**-27, 2)
    panel.set_xlabel("size of the number (power of two)")
    panel.set_ylabel("largest relative error")
    panel.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, 1.16), fontsize=9)
    figure.savefig(file, dpi=110)


picture(
    errors,
    "Largest relative error of a number of a given size, for five formats. Flat lines for float32 "
    "and bfloat16; float16 is more exact than bfloat16, but loses small numbers below 2 to the "
    "-14; both float8 are coarser, and lose them sooner.",
)

# %% [markdown]
# bfloat16 has float32's range and eight bits of precision. float16 has eleven, between 2^-14 and
# 2^16. The two eight-bit formats divide their few bits between range and precision in two ways.
#
# ## What is rounded away?
#
# **Predict:** which of these survive in which format?

# %%
print(f"{'':12}" + "".join(f"{value:>14}" for value in ("70000", "1 + 1/256", "256 + 1", "1e-8")))
for name in ("float32", "bfloat16", "float16"):
    values = (
        torch.tensor(value).to(FORMATS[name][0]).item()
        for value in (70000.0, 1 + 1 / 256, 257.0, 1e-8)
    )
    print(f"{name:12}" + "".join(f"{value:14.6g}" for value in values))

# %% [markdown]
# ## Rounding is adding, and cutting off
#
# A bfloat16 is the upper half of a float32.
#
# **Predict:** the lower half of this number is 0x8000, exactly the middle between two neighbours.
# To which does it go? And if the last bit of the upper half is 1?


# %%
def show_bits(bits):
    x = np.array([bits], np.uint32)
    rounded = torch.tensor(x.view(np.float32)).bfloat16()
    upper = int(rounded.view(torch.int16).item()) & 0xFFFF
    before = f"{bits >> 16:#06x} {bits & 0xFFFF:04x} = {x.view(np.float32)[0]:<12.9g}"
    print(f"{before} becomes {upper:#06x} = {rounded.item()}")


for bits in (0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001):
    show_bits(bits)

# %% [markdown]
# <details><summary>The answer</summary>
#
# To the neighbour whose last bit is 0: half of all ties go up, half down, and sums of many rounded
# numbers do not drift.
#
# </details>
#
# ## A weight that stands still
#
# **Predict:** a bfloat16 weight of 1 gets 400 updates of -0.001. Where is it then? With a float32
# master? Rounded at random?


# %%
def descents(steps=400, rate=1e-3):
    nearest, drawn = torch.ones(1).bfloat16(), torch.ones(1).bfloat16()
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer, generator = (
        MasterWeights([weight], torch.optim.SGD, lr=rate),
        torch.Generator().manual_seed(0),
    )
    found = {"to the nearest": [], "float32 master": [], "at random": []}
    for _ in range(steps):
        nearest -= rate
        drawn = stochastic_round(drawn.float() - rate, generator)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        for values, value in zip(found.values(), (nearest, weight, drawn), strict=True):
            values.append(value.item())
    return found


found = descents()
print({name: values[-1] for name, values in found.items()})


def curves(file):
    figure, (panel,) = figure_of()
    for (name, values), colour in zip(
        found.items(), ("#D55E00", "#0072B2", "#E69F00"), strict=True
    ):
        panel.plot(values, color=colour, label=name, linewidth=1.5)
    panel.set_xlabel("step")
    panel.set_ylabel("weight")
    panel.legend(frameon=False)
    figure.savefig(file, dpi=110)


picture(curves, "A weight over 400 steps of small updates, rounded in three ways")

# %% [markdown]
# <details><summary>The answer</summary>
#
# Rounded to the nearest the weight stays at 1. With a float32 master it falls straight to 0.6;
# rounded at random it falls beside that line, with small deviations.
#
# With rounding to the nearest, an update of less than half a step is always lost. The master weight
# adds up such updates until they make a whole step. With rounding at random, an update changes the
# weight only sometimes, but the result is right on average.
#
# </details>
#
# ## The loss scale
#
# **Predict:** four ranks, gradients of 2^-4, and a scale of 2^15 that doubles after three good
# steps. In step 3 rank 2 alone has a gradient 40 times as large. Which ranks skip?


# %%
def training(comm, decide):
    """Descend with a loss scale; return the steps that were skipped, the scales, and the weight at
    the end.
    """
    scaler, weight, seen = LossScaler(comm, scale=2.0**15, interval=3), 1.0, []
    for step in range(8):
        size = 40.0 if step == 3 and comm.rank == 2 else 1.0
        gradient = torch.full((4,), size * 2.0**-4 * scaler.scale).half()
        overflow = decide(scaler, gradient)
        seen.append("skip" if overflow else f"2^{int(np.log2(scaler.scale))}")
        if not overflow:
            weight -= 0.1 * 2.0**-4  # the mean of all ranks' gradients, had they all been there
        scaler.update(overflow)
    return " ".join(seen), weight


def together(scaler, gradient):
    return scaler.overflowed(gradient.float().norm())


for rank, (seen, weight) in enumerate(minidist.run(lambda comm: training(comm, together), ranks=4)):
    print(f"rank {rank}: {seen}   weight {weight:.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# All of them, and all halve the scale. It costs one all-reduce of one byte.
#
# </details>
#
# Here are two steps under a loss scale, event by event. Each of three ranks has a gradient of its own,
# as under ZeRO. In the first step that of rank 2 is too large for float16. Ranks 0 and 1 see nothing
# wrong with theirs, and learn of it from one byte.


# %%
def two_steps(comm):
    scaler = LossScaler(comm, scale=2.0**12)
    held = comm.watch("gradient · scale", np.zeros(1))
    inverse = comm.watch("1 / scale", np.full(1, 1 / scaler.scale))
    weight = comm.watch("weight", np.full(1, 0.5))
    for size in (40.1 if comm.rank == 2 else 0.1, 0.1):
        gradient = torch.tensor([size * scaler.scale]).half()
        held[:] = gradient.double().numpy()
        overflow = scaler.overflowed(gradient.float().norm())
        if not overflow:
            weight -= 0.1 * held / scaler.scale
        scaler.update(overflow)
        inverse[:] = 1 / scaler.scale


show(record(two_steps, ranks=3), frames=4)

# %% [markdown]
# ## Eight bits
#
# **Predict:** a tensor of normal numbers around 0.001. How large is the relative error of E4M3
# without a scale? With the power of two that brings its largest to 448 at most?

# %%
x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 1e-3
for name, scale in (("none", torch.tensor(1.0)), ("its own", scale_for(x.abs().max(), E4M3))):
    for dtype in (E4M3, E5M2):
        error = (dequantize(quantize(x, dtype, scale), scale) - x).norm() / x.norm()
        print(f"scale {name:8} {scale:8g}   {str(dtype)[13:]:7}  relative error {error:.4f}")

# %% [markdown]
# ## Delayed scaling
#
# The scale is computed from the largest amax of the last three steps, so it is known before the
# tensor.
#
# **Predict:** the tensor triples in each of steps 10 to 13, and has an outlier in step 25. When
# does it saturate? For how long does the outlier cost precision?


# %%
def amaxes():
    sizes = [1.0] * 10 + [3.0, 9.0, 27.0, 81.0] + [81.0] * 26
    sizes[25] = 3000.0
    noise = torch.rand(len(sizes), generator=torch.Generator().manual_seed(0)).tolist()
    return [size * (0.9 + 0.1 * part) for size, part in zip(sizes, noise, strict=True)]


def largest_kept(now, history=3):
    """Return the largest magnitude that the scale of each step leaves unharmed."""
    pasts = [max(now[max(0, step - history) : step] or [now[0]]) for step in range(len(now))]
    return [448 / float(scale_for(torch.tensor(past), E4M3)) for past in pasts]


now = amaxes()
kept = largest_kept(now)
saturated = [step for step, (amax, most) in enumerate(zip(now, kept, strict=True)) if amax > most]
print("steps that saturate:", saturated)
print(
    "steps with a scale that is coarser than need be:",
    [s for s, a in enumerate(now) if kept[s] > 4 * a],
)


def delay(file):
    figure, (panel,) = figure_of()
    panel.step(
        range(len(now)),
        kept,
        where="mid",
        color="#0072B2",
        label="largest number that the scale leaves room for",
    )
    panel.plot(now, "o", color="#000000", markersize=4, label="amax of the tensor")
    panel.plot(
        saturated,
        [now[step] for step in saturated],
        "o",
        color="#D55E00",
        markersize=8,
        label="saturates",
    )
    panel.set_yscale("log")
    panel.set_ylim(0.3, 4e4)
    panel.set_xlabel("step")
    panel.legend(frameon=False, ncols=3, loc="upper left", fontsize=9)
    figure.savefig(file, dpi=110)


picture(
    delay,
    "The largest number that the scale leaves room for, and the tensor's own largest, over 40 "
    "steps",
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# While the tensor grows, four steps saturate until the scale has followed. The outlier in step 25
# saturates, too, and then the scale leaves too much room for three steps.
#
# If a tensor is larger than in all steps of the history, its largest values become 448 for this
# step; then the history has the new amax. An outlier makes the next three steps less precise; then
# it leaves the history.
#
# </details>
#
# ## Break it
#
# **Predict:** the same training as above, but each rank looks at its own gradients only. What do
# you see?


# %%
def alone(scaler, gradient):
    return not bool(gradient.isfinite().all())


for rank, (seen, weight) in enumerate(minidist.run(lambda comm: training(comm, alone), ranks=4)):
    print(f"rank {rank}: {seen}   weight {weight:.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# Nothing crashes. Rank 2 has another weight and another scale, and from here on it trains another
# model. An all-reduce would add gradients of different scales.
#
# </details>
#
# ## Now on real processes

# %% tags=["real"]
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import torch, minidist
from minidist.full.precision import LossScaler

comm = minidist.init()
scaler = LossScaler(comm)
gradient = torch.full((4,), 70000.0 if comm.rank == 2 else 1.0).half()
overflow = scaler.overflowed(gradient.float().norm())
scaler.update(overflow)
print(f"rank {comm.rank} of {comm.size}: overflow {overflow}, next scale {scaler.scale:g}")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "scaler.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 4 {file}

# %% [markdown]
# Next: [lesson 12](../lessons/12_mixed_precision/README.md), where you write it yourself.

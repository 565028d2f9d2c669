# %% [markdown]
# # 11 · Recomputation
#
# Backward needs what forward computed. These activations can be kept, or computed again. The
# picture shows the bytes that one training step of a GPT with 9 blocks holds, event by event: all
# blocks stored (orange), three segments (blue), and each block as a segment (green).

# %%
import sys

import matplotlib.pyplot as plt
import numpy as np
import torch

import minidist
from minidist.draw.notebook import picture, show
from minidist.draw.recording import record
from minidist.full.adjoint import copy_to, reduce_from
from minidist.full.memory.account import Account
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.full.recompute import best_interval, checkpoint, measure_block, recompute
from minidist.plan.memory.chain import Chain, Stage, tradeoff

CONFIG = GPTConfig(vocabulary=64, layers=9, hidden=32, heads=2, sequence=32)
TOKENS = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(0))


def activations(policy):
    """Bytes of activations held at each event of a training step."""
    model, account = GPT(CONFIG), Account()
    recompute(model, policy)
    account.watch(model)
    with account.recording():
        cross_entropy_sum(model(TOKENS[:, :-1]), TOKENS[:, 1:]).backward()
    return [held["activations"] for _, held in account.timeline]


HELD = {policy: activations(policy) for policy in ("none", "every 1", "every 3", "every 9")}


def draw_steps(file):
    figure, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    for policy, name, colour in (
        ("none", "stored", "#E69F00"),
        ("every 3", "segments of 3", "#0072B2"),
        ("every 1", "each block", "#009E73"),
    ):
        moment = np.linspace(0, 1, len(HELD[policy]))
        axes.plot(
            moment, np.array(HELD[policy]) / 1024, color=colour, label=name, drawstyle="steps-post"
        )
    axes.set_xlabel("progress of the step: forward, then backward")
    axes.set_ylabel("activations held (KiB)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)
    plt.close(figure)


picture(
    draw_steps,
    "KiB of activations held during a step. Stored, they climb to 1,700 and fall again. With "
    "segments of three blocks there are three hills below 600, with single blocks many below 250.",
)

# %% [markdown]
# Each tooth is a segment that is computed again in backward. It is as high as the bytes that the
# blocks of one segment save.
#
# ## How long should a segment be?
#
# A block's input has c bytes, and the block saves A. Segments of k hold ⌈L/k⌉ inputs, and k blocks
# at a time: peak(k) = k·A + ⌈L/k⌉·c.
#
# **Predict:** the textbook says √L blocks, so 3 of 9. Is that best here?

# %%
model = GPT(CONFIG)
x = torch.zeros(2, 32, CONFIG.hidden)
c, A = measure_block(model.layers[0], x, model.rotary(torch.arange(32), x.dtype), Where())
print(f"c = {c} bytes, A = {A} bytes = {A / c:.6f} c")
for k in (1, 3, 9):
    formula = k * A + -(-9 // k) * c
    print(f"k = {k}: formula {formula:9,} bytes, measured {max(HELD[f'every {k}']):9,}")
print("best of 9 blocks:", best_interval(9, c, A), "  of 1,000 blocks:", best_interval(1000, c, A))
print("best of 9 blocks if A = c:", best_interval(9, c, c))

# %% [markdown]
# <details><summary>The answer</summary>
#
# k = √(L·c/A). A block saves about twenty times its input, so the term k·A decides, and it is
# smallest for k = 1.
#
# </details>
#
# ## Who runs when?
#
# A plan in parentheses is recomputed from its input. Parentheses nest.
#
# **Predict:** in the plan `(0, ((1, 2), 3), 4)`, how often does block 1 run?


# %%
class Said(torch.nn.Module):
    """A block that says when it runs."""

    def __init__(self, number):
        super().__init__()
        self.number, self.linear = (
            number,
            torch.nn.Linear(2, 2, device="meta").to_empty(device="cpu"),
        )

    def forward(self, x):
        print(self.number, end=" ")
        return torch.tanh(self.linear(x))


class Chained(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Said(number) for number in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


chained = Chained()
for parameter in chained.parameters():
    torch.nn.init.constant_(parameter, 0.5)
recompute(chained, (0, ((1, 2), 3), 4))
print("forward: ", end="")
loss = chained(torch.ones(1, 2)).sum()
print("  backward: ", end="")
loss.backward()

# %% [markdown]
# <details><summary>The answer</summary>
#
# Three times. The outer segment comes back first: 1 and 2 only pass through, for the sake of 3.
# Then the inner one comes back in its turn. That is the price of holding neither 1 nor 2 while 3 is
# there.
#
# </details>
#
# ## What does a budget buy?
#
# Blocks that save much and compute little alternate with blocks that do the reverse. Each dot is a
# plan that no other plan beats in both bytes and seconds.
#
# **Predict:** a step that stores all blocks takes the most bytes. How much slower is a step with
# half of these bytes?

# %%
heavy, light = (
    Stage(forward=1, backward=2, output=1, saved=20),
    Stage(forward=4, backward=8, output=1, saved=4),
)
chain = Chain((heavy, light) * 4, input=1)
solutions = tradeoff(chain)
fastest = solutions[-1]
for solution in (
    solutions[-1],
    next(s for s in reversed(solutions) if s.peak <= fastest.peak / 2),
    solutions[0],
):
    print(f"{solution.peak:4} bytes {solution.time:6.1f} seconds  {solution.plan}")


def draw_budgets(file):
    figure, axes = plt.subplots(figsize=(7.5, 3.0), layout="constrained")
    peaks, times = [s.peak for s in solutions], [s.time for s in solutions]
    axes.step(
        [*peaks, peaks[-1] + 10], [*times, times[-1]], where="post", color="#0072B2", linewidth=1
    )
    axes.plot(peaks, times, "o", color="#D55E00", label="best plans")
    uniform = sum(stage.forward for stage in chain.stages) + fastest.time
    axes.axhline(
        uniform, color="#999999", linestyle="--", linewidth=1, label="everything recomputed once"
    )
    axes.set_xlabel("budget (bytes)")
    axes.set_ylabel("seconds of a step")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)
    plt.close(figure)


picture(
    draw_budgets,
    "Seconds of a step against the budget of bytes, and the time with everything recomputed once",
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# The curve is a staircase: from 94 s at 24 bytes, steep at first, to 60 at 106. Recomputing
# everything once takes 80, which a budget of 26 bytes beats.
#
# The blocks that save the most bytes are cheap to run again. So a good plan recomputes these
# blocks, and not all.
#
# </details>
#
# ## What if the block communicates?
#
# A tensor-parallel block ends its region by an all-reduce, and goes on with the sum.
#
# **Predict:** forward has one all-reduce, backward another. How many are there if the block is
# recomputed? And how many, if only the part between the two borders is recomputed?


# %%
def traffic(comm, policy):
    weight = torch.full((8, 8), 0.1, dtype=torch.float64, requires_grad=True)
    x = torch.ones(2, 8, dtype=torch.float64, requires_grad=True)

    def inside(x):
        return torch.tanh(x @ weight)

    def block(x, inside=inside):
        return torch.tanh(reduce_from(inside(copy_to(x, comm)), comm))

    if policy == "recompute the block":
        y = checkpoint(block, x)
    elif policy == "recompute inside":
        y = block(x, inside=lambda x: checkpoint(inside, x))
    else:
        y = block(x)
    y.sum().backward()
    return comm.traffic.messages, comm.traffic.bytes, round(x.grad.sum().item(), 6)


for policy in ("store", "recompute the block", "recompute inside"):
    found = minidist.run(lambda comm, policy=policy: traffic(comm, policy), ranks=4)
    print(f"{policy:20} (messages, bytes, gradient) of rank 0: {found[0]}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# There are 1.5 times as many, with the same gradient: nothing fails, but the step is slower. So cut
# segments at messages.
#
# </details>
#
# Here are the three all-reduces of a recomputed block, on two ranks. A colour shows whose term a cell
# holds. The output is there after the first. The second makes the same sum again, in backward; only
# the third makes something new, the gradient of the input.


# %%
def recomputed(comm):
    def block(x):
        return after * reduce_from(weight * copy_to(x, comm), comm)

    after, x = (torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.full_like(x, float(comm.contribution), requires_grad=True)
    comm.watch("a sum over ranks", torch.zeros(4, dtype=torch.float64), cells=2, variable="total")
    comm.watch("output", torch.zeros(4, dtype=torch.float64), cells=2, variable="y")
    gradient = comm.watch("gradient of the input", torch.zeros(4, dtype=torch.float64), cells=2)
    y = checkpoint(block, x)
    y.sum().backward()
    gradient[:] = x.grad


show(
    record(
        recomputed,
        ranks=2,
        formulas={"messages sent": "3 all-reduces; 2 if the sum is not in the segment"},
    ),
    frames=4,
)

# %% [markdown]
# ## Break it: other random numbers
#
# **Predict:** this dropout draws from its own generator, and nothing sets the generator back. Is
# the gradient right?


# %%
def dropped(x, generator):
    return x * (torch.rand(x.shape, generator=generator, dtype=x.dtype) < 0.5) * 2


def gradient(recomputed):
    generator = torch.Generator().manual_seed(1)
    x = torch.ones(10, dtype=torch.float64, requires_grad=True)
    y = checkpoint(dropped, x, generator) if recomputed else dropped(x, generator)
    y.square().sum().backward()
    return y.detach().tolist(), x.grad.tolist()


for recomputed in (False, True):
    y, found = gradient(recomputed)
    print("recomputed" if recomputed else "stored")
    print("    output  ", *(f"{value:2.0f}" for value in y))
    print("    gradient", *(f"{value:2.0f}" for value in found))

# %% [markdown]
# <details><summary>The answer</summary>
#
# An element that forward kept has the gradient 8. The recomputed run lost some of these: backward
# met another mask. The gradient is wrong, and there is no error. The package can notice only a
# second run that saves other tensors than the first.
#
# </details>

# %%
runs = []


def fickle(x):
    runs.append(1)
    return x.exp().square() if len(runs) == 1 else x * 2


try:
    checkpoint(fickle, torch.ones(3, requires_grad=True)).sum().backward()
except RuntimeError as error:
    print(error)

# %% [markdown]
# ## Now on real processes
#
# Data parallel on two processes of this machine, each block recomputed: DDP's hooks see each
# gradient once.

# %% tags=["real"]
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import torch, minidist
from minidist.full.memory.account import Account
from minidist.full.recompute import recompute
from minidist.full.model import GPT, GPTConfig, cross_entropy_sum
from minidist.full import DDP

comm = minidist.init()
tokens = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(comm.rank))
for policy in ("none", "full"):
    model, account = GPT(GPTConfig(vocabulary=64, layers=9, hidden=32, heads=2, sequence=32)), Account()
    recompute(model, policy)
    wrapped = DDP(model, comm, op="sum")
    account.watch(wrapped)
    with account.recording():
        cross_entropy_sum(wrapped(tokens[:, :-1]), tokens[:, 1:]).backward()
    norm = sum(parameter.grad.square().sum() for parameter in model.parameters()) ** 0.5
    if comm.rank == 0:
        print(f"{policy:5} {account.peaks['activations']:9,} bytes of activations, norm of the gradient {norm:.4f}")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "recompute.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 2 {file}

# %% [markdown]
# Next: [lesson 11](../lessons/11_recompute/README.md), where you write it yourself.

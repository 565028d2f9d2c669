# %% [markdown]
# # 19 · Experts
#
# Three ranks, six experts: ranks 0, 1 and 2 have two each. Each rank has four rows (a token that
# goes to two experts makes two), sorted by expert. Watch them find their experts: a colour is the
# rank that a row came from. Each expert adds its own rank's colour, so that you see who worked on
# what comes back. Step through with the arrow keys.

# %%
import sys
from functools import partial

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.utils.checkpoint import checkpoint

import minidist
from minidist import Cluster
from minidist.draw.notebook import picture, show
from minidist.draw.recording import record
from minidist.expert import dispatch
from minidist.full.adjoint import reduce_from
from minidist.full.collectives import all_reduce, all_to_all
from minidist.full.comm import DeadlockError
from minidist.full.expert.expert_parallel import parallelize_experts
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPTConfig, Where
from minidist.full.model.moe.balance import rebalance
from minidist.full.model.moe.combine import combine
from minidist.full.model.moe.routed import RoutedExperts, sum_over
from minidist.full.model.moe.router import router_logits

CHOSEN = ((0, 0, 1, 3), (1, 2, 2, 5), (0, 4, 5, 5))  # the expert of each row, by rank


def to_experts(comm):
    counts = torch.tensor([CHOSEN[comm.rank].count(expert) for expert in range(6)])
    rows = comm.watch("its rows, by expert", np.full(4, float(comm.contribution)), cells=4)
    places = []
    for number, name in enumerate(("at its first expert", "at its second expert")):
        came = sum(chosen.count(2 * comm.rank + number) for chosen in CHOSEN)
        places.append(comm.watch(name, np.zeros(came), cells=came))

    def expert(place, part):
        free = np.count_nonzero(place)  # rows of the senders before this one
        place[free : free + len(part)] = part[:, 0].numpy()
        return part + comm.contribution

    experts = [partial(expert, place) for place in places]
    back = dispatch(torch.from_numpy(rows)[:, None], counts, experts, comm)
    rows[:] = back[:, 0].numpy()


show(record(to_experts, ranks=3), frames=6)

# %% [markdown]
# First each rank tells the others how many rows are coming to each of their experts: the first
# all-to-all, of integers, which no cell shows. Then the rows travel, with uneven counts, and come
# back in the order in which they left. A *temporary* is a buffer that the code itself allocates,
# here to receive rows: first those that come to this rank's experts, later its own rows on their
# way back.
#
# ## A router that learns nothing
#
# The gradient of the router comes through the weights that experts' outputs are multiplied with.
# **Predict:** one expert for each token. Once a softmax over all scores, and then the choice; once
# the choice, and then a softmax over what was chosen. Which router learns?

# %%
generator = torch.Generator().manual_seed(0)


def layer_of(**options):
    """Return a layer of experts, with the same numbers each time."""
    layer = RoutedExperts(
        GPTConfig(hidden=8, heads=1, intermediate=16, sequence=64, **options), 0
    ).double()
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    return layer


x = torch.randn(1, 6, 8, dtype=torch.float64, generator=generator)
layer = layer_of(experts=4, top_k=1, raw_weights=True)
logits = router_logits(x, layer.router)
choice = logits.argmax(-1, keepdim=True)
for name, weights in (
    ("softmax, then choice", logits.softmax(-1).gather(-1, choice)),
    ("choice, then softmax", logits.gather(-1, choice).softmax(-1)),
):
    loss = combine(x, choice, weights, layer.experts, 4).square().sum()
    (gradient,) = torch.autograd.grad(loss, layer.router, retain_graph=True)
    print(
        f"{name}   weights {weights[0, 0, 0].item():.6f} {weights[0, 1, 0].item():.6f} ...",
        end="   ",
    )
    print(f"gradient of the router {gradient.norm():.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# A softmax over one number is 1, whatever the number is: its gradient is exactly 0. The experts
# learn all the same, the loss goes down, and nobody notices.
#
# </details>
#
# ## What an uneven load costs
#
# **Predict:** eight ranks with an expert each, 64 rows on each rank, and a machine on which a row
# takes a millisecond to compute and messages take no time. If one expert gets a quarter of all
# rows, how much longer does the layer take than with an even load? And if it gets all?


# %%
def seconds(comm, popular):
    """Return when the layer is done: `popular` of 64 rows go to expert 0, the others evenly to all
    others.
    """
    counts = [popular] + [
        (64 - popular) // 7 + (expert < (64 - popular) % 7) for expert in range(7)
    ]

    def expert(part):
        comm.advance(0.001 * len(part))
        return part

    dispatch(torch.zeros(64, 2), torch.tensor(counts), [expert], comm)
    comm.barrier()
    return comm.clock()


free = Cluster.uniform(latency=0, bandwidth=1e30)
for popular in (8, 16, 64):
    took = minidist.run(partial(seconds, popular=popular), 8, cluster=free)[0]
    print(
        f"expert 0 gets {popular} of each 64 rows: {took:.6f} s, {took / 0.064:.6f} times the "
        "even load"
    )

# %% [markdown]
# <details><summary>The answer</summary>
#
# Twice, and eight times: all wait for the rank of the popular expert. The time is that of the
# busiest expert, so what counts is its load over the mean.
#
# </details>
#
# ## Two remedies
#
# **Predict:** tokens that have something in common, so that a few experts get most of them. An
# auxiliary loss pushes scores down that are chosen too often; a bias on the choice goes up or down
# by a constant each step. Which is faster, and which does not change what an expert's output is
# multiplied with?

# %%
sequences = torch.randn(8, 64, 8, dtype=torch.float64, generator=generator) + 1
remedies = {
    "nothing": {},
    "auxiliary loss": {"balance": "aux", "balance_rate": 0.1},
    "bias": {"balance": "bias", "balance_rate": 0.002},
}
shares, loads = {}, {}
for name, options in remedies.items():
    layer, loads[name] = layer_of(experts=8, top_k=2, **options), []
    for _step in range(301):
        layer.router.grad = None
        # only the loss of the layer itself
        (0 * layer(sequences, Where(weight=1 / 512))).sum().backward()
        layer.router.data -= layer.router.grad
        shares[name] = layer.tally[:8] / layer.tally[:8].sum()
        loads[name].append(rebalance(layer).imbalance)
    told = "   ".join(f"step {step} {loads[name][step]:.6f}" for step in (0, 100, 200, 300))
    print(f"{name:14} busiest expert / mean:   {told}")


def draw_loads(file):
    """Draw the imbalance over the steps, and the experts' shares in the end."""
    figure = Figure(figsize=(8.5, 3.5), layout="constrained")
    curve, bars = figure.subplots(1, 2)
    for number, (name, colour) in enumerate(
        zip(remedies, ("#999999", "#0072B2", "#E69F00"), strict=True)
    ):
        curve.plot(loads[name], color=colour, label=name)
        bars.bar(
            [expert + (number - 1) * 0.27 for expert in range(8)], shares[name], 0.25, color=colour
        )
    bars.axhline(1 / 8, color="#1f2328", lw=0.8, ls=":")
    curve.set(xlabel="step", ylabel="busiest expert / mean", ylim=(0.9, None))
    bars.set(xlabel="expert", ylabel="share of the choices, last step", xticks=range(8))
    figure.legend(
        *curve.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )
    for panel in (curve, bars):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=90)


picture(
    draw_loads,
    "Left: the load of the busiest expert over the mean, by step; without a remedy it stays at "
    "3.5, with an auxiliary loss it falls to 1.02, with a bias to 1.2. Right: each expert's share "
    "of the choices at the end, beside 1/8.",
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# The auxiliary loss is faster here, and changes the router, and so the weights. The bias only
# chooses: weights are the scores without it. It goes in small steps, of which a real run makes
# many.
#
# </details>
#
# ## Who is counted, and when
#
# **Predict:** a step with recomputation: forward runs, and runs again for backward; then an
# evaluation runs forward alone. A layer has 12 tokens with two choices each. What does it count if
# it counts in forward, and what in backward?

# %%
layer = layer_of(experts=4, top_k=2, balance="bias")
counted = 0


def forward(tokens):
    global counted
    counted += 2 * tokens.shape[0] * tokens.shape[1]
    return layer(tokens)


tokens = torch.randn(2, 6, 8, dtype=torch.float64, generator=generator, requires_grad=True)
checkpoint(forward, tokens, use_reentrant=False).sum().backward()
with torch.no_grad():
    forward(tokens)
print(f"in forward {counted}, in backward {int(layer.tally[:4].sum())}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# In forward 72: the 24 choices twice for training, and once in evaluation. In backward 24. The
# layer hangs its counts, and its auxiliary loss, on the weights: an autograd function that returns
# them as they are, and acts in backward.
#
# </details>
#
# ## Who has room
#
# **Predict:** a sequence of eight tokens chooses among four experts; each has room for two. The
# sequence lies on two ranks. If each rank counts for itself, with room for one, does the same
# happen? (1: served, 0: dropped)

# %%
choice = torch.tensor([[0, 0, 1, 0, 2, 1, 0, 0]])[..., None]


def served(comm, together):
    layer = layer_of(experts=4, top_k=1, capacity=1.0, raw_weights=True)
    if together:
        sum_over(layer, partial(reduce_from, comm=comm))
    mine = torch.arange(8).chunk(comm.size)[comm.rank]
    return layer.kept(choice[:, mine], Where(positions=mine))[0, :, 0].int().tolist()


for ranks, together in ((1, True), (2, False), (2, True)):
    found = minidist.run(partial(served, together=together), ranks)
    print(
        f"{ranks} ranks,",
        "counting together:" if together else "each for itself:  ",
        *(each for part in found for each in part),
    )

# %% [markdown]
# <details><summary>The answer</summary>
#
# Token 1 is dropped, and token 6 is served: other tokens than on one rank. Room belongs to the
# sequence.
#
# </details>
#
# ## Gradients of experts
#
# **Predict:** four ranks, and experts spread over ep of them. Each rank takes the mean loss of its
# own tokens, and averages gradients over all ranks that have the parameter, as data parallelism
# does. How do the experts' gradients compare with those of one rank, for ep = 1, 2, 4? And the
# router's?

# %%
batch = torch.randn(4, 16, 8, dtype=torch.float64, generator=generator)


def gradients(comm, ep, averaged):
    layer, mesh = layer_of(experts=4, top_k=2), Mesh(comm, Layout(dp=comm.size, ep=ep))
    parallelize_experts(layer, mesh)
    mine = batch.chunk(comm.size)[comm.rank]
    (layer(mine).square().sum() / (64 // comm.size if averaged else 64)).backward()
    copies = mesh.data if ep == 1 else mesh.over("edp")
    found = []
    for gradient, group in ((layer.experts.up.grad.clone(), copies), (layer.router.grad, comm)):
        all_reduce(gradient, group)
        found.append(gradient / group.size if averaged else gradient)
    return found


(whole,) = minidist.run(partial(gradients, ep=1, averaged=False), 1)
for averaged in (True, False):
    for ep in (1, 2, 4):
        found = minidist.run(partial(gradients, ep=ep, averaged=averaged), 4)[0]
        experts, router = (
            (mine / right[: len(mine)]).mean().item()
            for mine, right in zip(found, whole, strict=True)
        )
        print(f"{'means averaged' if averaged else 'shares summed '}   ep = {ep}", end="   ")
        print(f"experts {experts:.6f}, router {router:.6f} times the gradient on one rank")

# %% [markdown]
# <details><summary>The answer</summary>
#
# ep times too large, and the router's is right. The tokens of ep ranks come to an expert, each with
# a gradient that is not yet divided by ep. If each rank takes its share of the loss instead,
# gradients are summed over those who have the parameter, and nothing is divided.
#
# </details>
#
# ## Break it
#
# **Predict:** rank 2 has no tokens in this step, so its programmer lets it go on. What happens?


# %%
def goes_on(comm):
    counts = torch.tensor([1, 1, 1] if comm.rank != 2 else [0, 0, 0])
    if not counts.any():
        return counts
    return all_to_all(counts, comm)


try:
    minidist.run(goes_on, ranks=3)
except DeadlockError as error:
    print(error)

# %% [markdown]
# <details><summary>The answer</summary>
#
# Ranks 0 and 1 wait for its counts for ever. A rank without tokens has rows to receive, too: its
# experts are still wanted. Here nobody got so far.
#
# </details>
#
# **Predict:** a rank gives rows back in another order than they came: each one place too late, the
# last one first. All shapes are right. The last of eight tokens is changed: which outputs change?
# Which may, in a model that predicts the next token?

# %%
layer = layer_of(experts=4, top_k=2)
experts = layer.experts.forward


def combined(x, in_order):
    layer.experts.forward = lambda rows, counts: experts(rows, counts).roll(0 if in_order else 1, 0)
    return layer(x)


before = torch.randn(1, 8, 8, dtype=torch.float64, generator=generator)
after = before.clone()
after[0, -1] = -before[0, -1]
for in_order in (True, False):
    changed = (combined(before, in_order) - combined(after, in_order)).abs().sum(-1)[0] > 0
    print(
        "in order:          " if in_order else "one place too late:",
        "changed",
        changed.nonzero()[:, 0].tolist(),
    )

# %% [markdown]
# <details><summary>The answer</summary>
#
# Its own, and no other. In another order tokens get what was made of others, of later ones as well:
# the model reads ahead. In training its loss looks good.
#
# </details>
#
# ## Now on real processes
#
# A GPT with eight experts on four processes of this machine, two experts on each. Their shares add
# up to the loss.

# %% tags=["real"]
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import torch, minidist
from minidist.full.collectives import all_reduce
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPT, GPTConfig, cross_entropy_sum
from minidist.full.model.moe.routed import routed_in
from minidist.full.expert.expert_parallel import parallelize_experts

comm = minidist.init()
config = GPTConfig(vocabulary=32, layers=2, hidden=32, heads=4, intermediate=64, sequence=32, experts=8)
tokens = torch.arange(33).remainder(32)[None] + torch.arange(4)[:, None]
model, tokens = GPT(config, dtype=torch.float64), tokens % 32
with torch.no_grad():
    whole = cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:]) / 128
parallelize_experts(model, Mesh(comm, Layout(dp=comm.size, ep=comm.size)))
mine = tokens.chunk(comm.size)[comm.rank]
share = cross_entropy_sum(model(mine[:, :-1]), mine[:, 1:]) / 128
share.backward()
total = share.detach().clone().view(1)
all_reduce(total, comm)
print(f"rank {comm.rank} has {len(routed_in(model)[0].experts.up)} experts of a layer: its share {share.item():.6f} "
      f"of {total.item():.6f}, alone {whole.item():.6f}")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "experts.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 4 {file}

# %% [markdown]
# Next: [lesson 19](../lessons/19_experts/README.md), where you write it yourself.

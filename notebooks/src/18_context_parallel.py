# %% [markdown]
# # 18 · Context parallelism
#
# Four ranks with two tokens each. Attention is causal: each token needs the keys and values of all
# tokens before it, and most of them are on other ranks. So keys and values go round. The square on
# the right shows whose queries have met whose keys by now. Step through with the arrow keys.

# %%
import sys
from functools import partial

import torch
from matplotlib.figure import Figure

import minidist
from minidist import Cluster
from minidist.context import RingAttention, pass_on
from minidist.draw.attention import record_attention
from minidist.draw.notebook import picture, show
from minidist.full.context import shard_tokens
from minidist.full.context.blocks import before_any, meet
from minidist.full.context.flash import attend, attend_backward
from minidist.full.context.order import Meeting, meeting, pairs, positions
from minidist.full.context.ring import Ring
from minidist.full.context.ulysses import Ulysses
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.full.model.gpt import causal_attention

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # of ranks 0 to 3 (Okabe & Ito 2008)

show(record_attention(RingAttention.apply, ranks=4, output="output"), frames=4)

# %% [markdown]
# The queries stay where they are. A rank holds its neighbour's keys besides its own, never those of
# all ranks.
#
# ## One softmax in pieces
#
# A rank meets the keys a block at a time. For each block, flash attention gives an output, and for
# each query lse = log Σ exp(score). **Predict:** eight keys in two blocks of four. How far is the
# plain average of the two outputs from attention to all eight? And the mean with weights exp(lse),
# if scores are about 1, and about 1000?

# %%
generator = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


query, key, value = draw(1, 1, 6, 4), draw(1, 1, 8, 4), draw(1, 1, 8, 4)
for large in (1, 1000):
    whole, _ = attend(large * query, key, value, False)
    halves = [
        attend(large * query, key[:, :, at], value[:, :, at], False)
        for at in (slice(4), slice(4, 8))
    ]
    (first, lse), (second, its) = halves
    before, now = lse.exp()[..., None], its.exp()[..., None]
    mine = before_any(large * query)
    for at in (slice(4), slice(4, 8)):
        # all queries, all keys of the half
        meet(mine, torch.stack((key, value))[..., at, :], Meeting())
    for name, found in (
        ("plain average", (first + second) / 2),
        ("with exp(lse)", (before * first + now * second) / (before + now)),
        ("by the difference of the two lse", mine.output),
    ):
        print(f"scores of {large:4}, {name:33} off by {(found - whole).abs().max():.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# The average is far off: a block in which the query finds nothing of interest counts as much as the
# other. With exp(lse) it is exact, until exp overflows: infinity by infinity is not a number. The
# package merges by the difference of the two lse, which stays small where both are large.
#
# </details>
#
# ## Round again, with gradients
#
# In backward the blocks go round once more, and a sum of gradients follows each. **Predict:** P =
# 4, and n bytes of keys and values on each rank. How many n does a rank send in forward, how many
# in backward? Where is the sum for a block when the last rank has added its term?

# %%
q, k, v = draw(1, 2, 16, 4), draw(1, 2, 16, 4), draw(1, 2, 16, 4)


def ring(comm):
    mine = [x.chunk(comm.size, 2)[comm.rank].clone().requires_grad_() for x in (q, k, v)]
    output = RingAttention.apply(*mine, comm)
    forward = comm.traffic.bytes
    output.sum().backward()
    n = sum(x.nbytes for x in mine[1:])
    return forward / n, (comm.traffic.bytes - forward) / n, mine[1].grad


results = minidist.run(ring, ranks=4)
print(f"forward {results[0][0]:g} n, backward {results[0][1]:g} n")
gradient = torch.cat([grad for *_, grad in results], 2)
print(
    "keys' gradient as on one rank:",
    torch.allclose(gradient, minidist.run(ring, ranks=1)[0][2], rtol=1e-12),
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# Forward P - 1 = 3; backward P - 1 for the blocks and P for the sums, together 7. After P - 1 hops
# the sum for rank r's block is on rank r - 1, its left neighbour, which was the last to add a term.
# It needs one hop more.
#
# </details>
#
# ## Who has the most to do?
#
# **Predict:** neighbouring tokens on each of four ranks, as above. Which rank computes most, and
# how many times the mean? What if each rank has two chunks of the sequence instead, the r-th and
# the r-th from the end (zigzag)?


# %%
def work(order, ranks, own=4):
    """Return by rank, and by hop, how many pairs of a query and a key it computes, in units of
    (T/P)².
    """
    sources = [[(rank - hop) % ranks for hop in range(ranks)] for rank in range(ranks)]
    return [
        [pairs(meeting(order, r, s, own), own) / own**2 for s in them]
        for r, them in enumerate(sources)
    ]


for ranks in (2, 4, 8):
    for order in ("contiguous", "zigzag"):
        each = [sum(hops) for hops in work(order, ranks)]
        print(f"P = {ranks} {order:10} slowest / mean {max(each) * ranks / sum(each):.6f}")


def draw_work(file):
    """Draw the mask, coloured by the rank that computes a pair, and below it the work of each
    hop.
    """
    figure = Figure(figsize=(8.5, 4.6), layout="constrained")
    panels = figure.subplots(2, 3, gridspec_kw={"height_ratios": (3, 2)})
    for (mask, bars), order in zip(panels.T, ("contiguous", "zigzag", "striped"), strict=True):
        for rank in range(4):
            for place in positions(order, 4, rank, 16).tolist():
                mask.barh(place, place + 1, 1, left=0, color=COLOURS[rank])
        mask.set(
            title=order,
            xlim=(0, 16),
            ylim=(15.5, -0.5),
            aspect="equal",
            xticks=[],
            yticks=[],
            xlabel="keys",
        )
        for rank, hops in enumerate(work(order, 4, 64)):
            bars.bar(
                [hop + (rank - 1.5) / 5 for hop in range(4)],
                hops,
                0.18,
                color=COLOURS[rank],
                label=f"rank {rank}",
            )
        bars.set(xticks=range(4), xlabel="hop", ylim=(0, 1.05))
        bars.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("queries")
    panels[1][0].set_ylabel("blocks computed")
    figure.legend(
        *panels[1][0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.savefig(file, dpi=90)


picture(
    draw_work,
    "Causal masks of 16 tokens on four ranks, coloured by rank, in contiguous, zigzag and striped "
    "order; below, the work of each rank in each hop: uneven in contiguous order, half a block "
    "for every rank in the two others.",
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# In contiguous order rank r computes r + 1/2 blocks, the last one (2P - 1)/P times the mean: 1.75
# of it on four ranks, and nearly twice on many. In zigzag order all compute the same, and in *each
# hop* the same: half of a block. That counts, since after each hop a rank waits for its neighbour's
# block.
#
# </details>
#
# The same on the virtual clock, with a machine on which a block takes a second, and messages
# nothing. **Predict:** how long does attention take on 2, 4 and 8 ranks, in both orders?


# %%
def clock(comm, order, own=64):
    token = torch.zeros(1)
    for hop in range(comm.size):
        source = (comm.rank - hop) % comm.size
        comm.advance(pairs(meeting(order, comm.rank, source, own), own) / own**2)
        token = pass_on(token, comm)
    return comm.clock()


free = Cluster.uniform(latency=0, bandwidth=1e30)
for ranks in (2, 4, 8):
    seconds = {
        order: max(minidist.run(partial(clock, order=order), ranks, cluster=free))
        for order in ("contiguous", "zigzag")
    }
    ratio = seconds["contiguous"] / seconds["zigzag"]
    print(
        *(f"{order} {each:.6f} s" for order, each in seconds.items()),
        f"ratio {ratio:.6f}",
        sep="   ",
    )

# %% [markdown]
# <details><summary>The answer</summary>
#
# Contiguous order takes P - 1/2 seconds, zigzag P/2: 1.5, 1.75 and 1.875 times as long.
#
# </details>
#
# Here is zigzag order, with the ring that overlaps. **Predict:** rank 0 has tokens 0 and 7. Which
# of its queries meets the keys of rank 2, and which keys of rank 0 does rank 2 meet?


# %%
def in_zigzag(query, key, value, comm):
    return Ring(comm, "zigzag", causal_attention, comm.stream())(query, key, value)


show(record_attention(in_zigzag, ranks=4, order="zigzag"), frames=3)

# %% [markdown]
# <details><summary>The answer</summary>
#
# Rank 2 has tokens 2 and 5. Token 0 sees neither, token 7 sees both: of rank 0 only the later query
# takes part. And of rank 0's keys only the earlier one, token 0, is seen, by both queries of rank
# 2.
#
# </details>
#
# ## Heads for tokens
#
# Ulysses exchanges tokens for heads, attends, and exchanges back. **Predict:** 64 tokens, 8 heads
# of 16 channels, float64. With twice as many ranks, does a rank send half as many bytes, as many,
# or twice as many? And a ring? What if there are only two heads of keys?


# %%
def sent(comm, attend, heads, groups):
    own = 64 // comm.size
    parts = [
        torch.zeros(1, count, own, 16, dtype=torch.float64) for count in (heads, groups, groups)
    ]
    attend(comm)(*parts)
    return comm.traffic.bytes


def around(comm):
    return Ring(comm, "zigzag", causal_attention, comm.stream())


for groups in (8, 2):
    for ranks in (2, 4, 8):
        by_heads = partial(
            sent,
            attend=lambda comm: Ulysses(comm, "zigzag", causal_attention),
            heads=8,
            groups=groups,
        )
        by_ring = partial(sent, attend=around, heads=8, groups=groups)
        ulysses_bytes, ring_bytes = (max(minidist.run(one, ranks)) for one in (by_heads, by_ring))
        print(
            f"{groups} heads of keys, {ranks} ranks:   Ulysses {ulysses_bytes:7,}   ring "
            f"{ring_bytes:7,}"
        )

try:
    minidist.run(by_heads, ranks=16)
except ValueError as error:
    print(error)

# %% [markdown]
# <details><summary>The answer</summary>
#
# Ulysses sends (P - 1)/P of an ever smaller tensor: with eight heads of keys 2/P of what a ring
# sends. A ring sends nearly all keys, whatever P is; but to a neighbour, while it computes, and
# there may be more ranks than heads. With two heads of keys a ring sends a quarter, and Ulysses
# still has to move all queries.
#
# </details>
#
# ## Break it
#
# **Predict:** in backward, each block is treated as if it was all there is: with its own output and
# lse. The shapes are right, and forward is untouched. Which of the gradients below are wrong?


# %%
def backward(comm, own_lse):
    query, key, value = (x.chunk(comm.size, 2)[comm.rank] for x in (q, k, v))
    output, lse = (x.chunk(comm.size, 2)[comm.rank] for x in attend(q, k, v, True))
    block, to_query = torch.stack((key, value)), torch.zeros_like(query)
    to_block = torch.zeros_like(block)
    for hop in range(comm.size):
        if hop <= comm.rank:
            told = attend(query, *block, hop == 0) if own_lse else (output, lse)
            found = attend_backward(torch.ones_like(output), query, *block, *told, hop == 0)
            to_query += found[0]
            to_block += torch.stack(found[1:])
        block, to_block = pass_on(block, comm), pass_on(to_block, comm)
    return to_query, *to_block


right, wrong = (minidist.run(partial(backward, own_lse=own), ranks=4) for own in (False, True))
for rank in range(4):
    off = [(a - b).abs().max().item() for a, b in zip(right[rank], wrong[rank], strict=True)]
    print(f"rank {rank}: query off by {off[0]:.6f}, key by {off[1]:.6f}, value by {off[2]:.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# All but that of rank 0's queries, which meet one block only. Each block's weights add up to 1 by
# themselves, so the weights of all blocks add up to more. (Rank 3's keys are met by its own queries
# only, but these have met others.)
#
# </details>
#
# **Predict:** tokens lie in zigzag order, and somebody forgets to tell the model, which then takes
# their positions for those of neighbours. An error, or another loss?

# %%
config = GPTConfig(vocabulary=32, layers=2, hidden=32, heads=4, intermediate=64, sequence=32)
tokens = torch.randint(32, (2, 33), generator=generator)


def loss(comm, told):
    model = GPT(config, dtype=torch.float64)
    for parameter in model.parameters():
        parameter.data *= 10  # so that attention has something to choose
    ring = Ring(comm, "zigzag", causal_attention, comm.stream())
    for layer in model.layers:
        layer.attention.attend = ring
    inputs, mine = shard_tokens(tokens[:, :-1], comm, "zigzag")
    labels, _ = shard_tokens(tokens[:, 1:], comm, "zigzag")  # shifted before they are cut
    places = mine if told else comm.rank * len(mine)
    share = (
        cross_entropy_sum(model(inputs, Where(positions=places)), labels)
        / labels.numel()
        / comm.size
    )
    return share.item()


print(f"told      {sum(minidist.run(partial(loss, told=True), ranks=4)):.6f}")
print(f"not told  {sum(minidist.run(partial(loss, told=False), ranks=4)):.6f}")
print(f"one rank  {sum(minidist.run(partial(loss, told=True), ranks=1)):.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# No error: another loss. Only the comparison with one rank shows it. So `parallelize_context`,
# which puts the ring into a model for you, asks a GPT for the positions of its tokens, and refuses
# a number.
#
# </details>
#
# ## Now on real processes
#
# A GPT on four processes of this machine, each with a quarter of the tokens. Their shares add up to
# the loss.

# %% tags=["real"]
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import torch, minidist
from minidist.full.collectives import all_reduce
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.full.context import parallelize_context, shard_tokens

comm = minidist.init()
config = GPTConfig(vocabulary=32, layers=2, hidden=32, heads=4, intermediate=64, sequence=32)
tokens = torch.arange(33).remainder(32)[None]
model = GPT(config, dtype=torch.float64)
whole = cross_entropy_sum(model(tokens[:, :-1]), tokens[:, 1:]) / 32
parallelize_context(model, comm, "ring", "zigzag")
(inputs, mine), (labels, _) = (shard_tokens(x, comm, "zigzag") for x in (tokens[:, :-1], tokens[:, 1:]))
share = cross_entropy_sum(model(inputs, Where(positions=mine)), labels) / 32
share.backward()
total = share.detach().clone().view(1)
all_reduce(total, comm)
print(f"rank {comm.rank} has tokens {mine.tolist()}: its share {share.item():.6f} of {total.item():.6f}, "
      f"alone {whole.item():.6f}")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "context.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 4 {file}

# %% [markdown]
# Next: [lesson 18](../lessons/18_context_parallel/README.md), where you write it yourself.

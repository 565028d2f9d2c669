# %% [markdown]
# # 17 · Flash attention
#
# Attention compares every query with every key. Its weights are a matrix of T x T, which flash
# attention computes tile by tile and never holds. Here is the package's own loop over eight tokens,
# in tiles of two queries and two keys. The square fills where the output of a query has something
# of a key. Step through it with the arrow keys.

# %%
import sys

import matplotlib.pyplot as plt
import numpy as np
import torch

import minidist
from minidist.draw.attention import record_attention
from minidist.draw.notebook import picture, show
from minidist.full.context import flash_attention
from minidist.full.context.flash import TILE, page_forward, tiles
from minidist.full.memory.account import Account


def by_tiles(query, key, value, comm):
    return page_forward(query, key, value, causal=True, tile=2)


show(record_attention(by_tiles, ranks=1, tokens=8, block="", output="output"), frames=4)

# %% [markdown]
# A row of tiles is finished before the next begins. Tiles above the diagonal never come up: no
# query sees a later key. These are the tiles of 1,024 tokens; those at the diagonal (orange) need a
# mask, those above it (white) cost nothing.

# %%
T = 1024


def draw_tiles(file):
    figure, axes = plt.subplots(figsize=(4.2, 4.0), layout="constrained")
    for rows, columns in tiles(T, T, causal=True):
        colour = "#E69F00" if rows == columns else "#0072B2"
        axes.add_patch(
            plt.Rectangle(
                (columns.start, rows.start), TILE, TILE, facecolor=colour, edgecolor="white"
            )
        )
    axes.set(xlim=(0, T), ylim=(T, 0), xticks=range(0, T + 1, 256), yticks=range(0, T + 1, 256))
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    figure.savefig(file, dpi=130)
    plt.close(figure)


picture(
    draw_tiles,
    "A triangle of tiles of 128 x 128: whole ones below the diagonal, masked ones at it, none "
    "above. 36 of 64 tiles are computed.",
)

# %% [markdown]
# ## Bytes that grow with T²
#
# The account counts what autograd keeps from forward to backward, in plain attention and in flash
# attention.
#
# **Predict:** T doubles. How many times as many bytes does each of the two keep?


# %%
def plain_attention(query, key, value):
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return scores.masked_fill_(later, -torch.inf).softmax(-1) @ value


def drawn(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, 2, tokens, 16, dtype=torch.float64, generator=generator) for _ in range(3)
    ]


def kept(attention, tokens):
    account = Account()
    with account.recording():
        output = attention(*(x.requires_grad_() for x in drawn(tokens)))
    return account.now["activations"] * bool(output.numel())


LENGTHS = (128, 256, 512, 1024)
BYTES = {
    "plain": [kept(plain_attention, tokens) for tokens in LENGTHS],
    "flash": [
        kept(lambda q, k, v: flash_attention(q, k, v, True)[0], tokens) for tokens in LENGTHS
    ],
}
for tokens, plain, flash in zip(LENGTHS, BYTES["plain"], BYTES["flash"], strict=True):
    print(f"T = {tokens:5,}: plain {plain:11,} bytes, flash {flash:9,} bytes")


def draw_bytes(file):
    figure, axes = plt.subplots(figsize=(6.0, 3.0), layout="constrained")
    for name, colour in (("plain", "#D55E00"), ("flash", "#0072B2")):
        axes.loglog(LENGTHS, np.array(BYTES[name]) / 1024, "o-", base=2, color=colour, label=name)
    axes.set_xlabel("T (tokens)")
    axes.set_ylabel("KiB kept for backward")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)
    plt.close(figure)


picture(
    draw_bytes,
    "KiB kept for backward against T, both axes logarithmic: plain is twice as steep as flash",
)

# %% [markdown]
# <details><summary>The answer</summary>
#
# Plain attention comes closer and closer to four times as many: the weights have T² numbers, and
# soon nothing else counts. Flash attention keeps exactly twice as many: query, key, value, output,
# and one number for each query.
#
# </details>
#
# ## A softmax that does not know all scores
#
# The online softmax adds up exp(score - m), where m is the largest score so far. Whenever a larger
# score comes, the sum shrinks. The same 64 scores come one by one: from the smallest to the
# largest, from the largest to the smallest, and in random order.
#
# **Predict:** in each of the three orders, how often does the sum shrink? And which order gives the
# right result?


# %%
def online(scores):
    """Return the logarithm of the sum of exp(score), from tiles of one key, and how often the sum
    shrank.
    """
    query, keys = (
        torch.ones(1, 1, 1, 1, dtype=torch.float64),
        torch.from_numpy(scores.copy())[None, None, :, None],
    )
    _, lse = page_forward(query, keys, keys, causal=False, tile=1)
    return lse.item(), np.count_nonzero(np.diff(np.maximum.accumulate(scores)))


scores = np.random.default_rng(0).normal(size=64) * 300
orders = {"ascending": np.sort(scores), "descending": np.sort(scores)[::-1], "random": scores}
with np.errstate(over="ignore"):
    print(f"the sum of exp(score), written as it stands: {np.exp(scores * 3).sum()}")
for name, ordered in orders.items():
    result, shrunk = online(ordered)
    print(f"{name:10} {result:.6f}, shrunk {shrunk} times")

# %% [markdown]
# <details><summary>The answer</summary>
#
# 63 times, never, and 6 times: the n-th of random numbers is larger than all before with
# probability 1/n, so one expects about log 64 = 4 times. The result is the same. For a tile of many
# scores the sum shrinks at most once.
#
# </details>
#
# ## Weights come back, tile by tile
#
# Forward keeps for each query lse, the logarithm of the sum over all its keys. Backward computes
# the scores of a tile again, and from them the weights exp(score - lse).
#
# **Predict:** take one tile in the middle, and compute its weights in two ways: exp(score - lse),
# and a softmax of this tile alone. What do its rows sum up to, in each of the two ways?

# %%
query, key, value = drawn(512)
output, lse = page_forward(query, key, value, causal=False)
rows, columns = slice(128, 256), slice(256, 384)
scores = query[..., rows, :] @ key[..., columns, :].mT / 4
whole = (query @ key.mT / 4).softmax(-1)[..., rows, columns]
for name, weights in (
    ("exp(score - lse)", (scores - lse[..., rows, None]).exp()),
    ("softmax of a tile", scores.softmax(-1)),
):
    off = (weights - whole).abs().max().item()
    first = ", ".join(f"{number:.6f}" for number in weights.sum(-1)[0, 0, :4].tolist())
    print(f"{name:18} rows sum up to {first}, ...; off by {0.0 if off < 1e-12 else off:.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# With lse, a row of the tile sums up to the share that these keys have in all weights: about a
# quarter, as the tile has a quarter of the keys. A softmax of the tile makes every row sum up to 1:
# the gradients would be too large, and each row's in another way.
#
# </details>
#
# ## Break it: nothing shrinks
#
# This attention subtracts the largest score of each tile and adds up. It forgets that the sums of
# different tiles are in different units.
#
# **Predict:** for which tile sizes is the result right? Does a test with 100 tokens and tiles of
# 128 find the mistake?


# %%
def never_rescaled(query, key, value, tile):
    sums, total = torch.zeros_like(query), torch.zeros_like(query[..., :1])
    for some_keys, some_values in zip(key.split(tile, 2), value.split(tile, 2), strict=True):
        scores = query @ some_keys.mT / 4
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        sums, total = sums + weights @ some_values, total + weights.sum(-1, keepdim=True)
    return sums / total


query, key, value = drawn(100)
right = (query @ key.mT / 4).softmax(-1) @ value
for tile in (128, 100, 64, 16, 1):
    off = (never_rescaled(query, key, value, tile) - right).abs().max().item()
    print(f"tiles of {tile:3} keys: off by {0.0 if off < 1e-12 else off:.6f}")

# %% [markdown]
# <details><summary>The answer</summary>
#
# Only where one tile holds all keys. The outputs are plausible at every size: they are means of the
# values. With tiles of one key each weight is exp(0) = 1, and the output is the plain mean. So test
# with several tiles, and with a last one that is not full.
#
# </details>
#
# ## Which corner?
#
# **Predict:** two queries and four keys, causal. Does the first query see one key, or three?

# %%
query, key = (
    torch.zeros(1, 1, 2, 1, dtype=torch.float64),
    torch.zeros(1, 1, 4, 1, dtype=torch.float64),
)
value = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).view(1, 1, 4, 1)
output, lse = page_forward(query, key, value, causal=True)
print("output", [f"{number:.6f}" for number in output.flatten().tolist()])
print("keys seen", [f"{number:.6f}" for number in lse.exp().flatten().tolist()])

# %% [markdown]
# <details><summary>The answer</summary>
#
# One: here, as in PyTorch, query i sees keys 0 to i. All scores are 0, so lse is the logarithm of
# the number of keys. FlashAttention's own library counts from the bottom right: there the first
# query sees three keys, and the last all.
#
# </details>
#
# ## Now on real processes
#
# If partial results merge by their lse, keys may also come from another process. In ring attention
# each process has a part of the tokens, and keys and values go round. Lesson 18 builds it.

# %% tags=["real"]
from pathlib import Path
from tempfile import TemporaryDirectory

program = """
import torch, minidist
from minidist.context import RingAttention
from minidist.full.context.flash import page_forward

comm = minidist.init()
generator = torch.Generator().manual_seed(0)
whole = [torch.randn(1, 2, 256, 16, dtype=torch.float64, generator=generator) for _ in range(3)]
mine = [x.chunk(comm.size, 2)[comm.rank].contiguous() for x in whole]
output = RingAttention.apply(*mine, comm)
expected = page_forward(*whole, causal=True)[0].chunk(comm.size, 2)[comm.rank]
print(f"rank {comm.rank}: {output.shape[2]} queries met 256 keys, off by {(output - expected).abs().max():.0e}, "
      f"{comm.traffic.bytes:,} bytes sent")
"""
with TemporaryDirectory() as folder:
    file = Path(folder, "ring.py")
    file.write_text(program)
    # !{sys.executable} -m minidist launch -n 2 {file}

# %% [markdown]
# Next: [lesson 17](../lessons/17_flash_attention/README.md), where you write it yourself.

"""Lesson 07, tasks 2 and 3: the judge of layers, and what comes out of them by mistake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F
from judges import CUTS, expect_reduced
from torch import Tensor

from minidist.course.grader import contract
from minidist.course.grader.contract import Array, Arrays, Case, Judge, Note, Wrong


def whole_mlp(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """The MLP on one rank."""
    hidden = F.gelu(F.linear(x, weights["up.weight"], weights["up.bias"]))
    return F.linear(hidden, weights["down.weight"], weights["down.bias"])


def whole_attention(x: Tensor, weights: Mapping[str, Tensor], heads: int) -> Tensor:
    """Attention on one rank: softmax(QKᵀ/√d) V, as it is written."""
    q, k, v = (
        (x @ weights[name].T).view(2, 3, heads, -1).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    later = torch.ones(3, 3, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights["output"].T


def cut(array: Array, ranks: int, dim: int | None) -> list[Array]:
    """Return every rank's slice."""
    return [array] * ranks if dim is None else np.array_split(array, ranks, axis=dim)


def wrong_slices(case: Case, rank: int, whole: Array, dim: int | None) -> dict[str, Array]:
    """Return what a rank gets if a matrix is cut in another way."""
    if dim is None:
        return {
            "it is divided by the number of ranks": whole / case.ranks,
            "rank 0 alone has it, and the others have zeros": whole * (rank == 0),
            "it is cut, as the other bias is": np.array_split(whole, case.ranks)[rank],
        }
    size, ranks, heads = whole.shape[dim], case.ranks, int(case.given[0].get("heads", 0))
    fewest, most = size // ranks, -(-size // ranks)
    takes = {
        "the last rank takes what is left over": np.arange(
            rank * fewest, size if rank == ranks - 1 else (rank + 1) * fewest
        ),
        "all parts but the last are rounded up, as by torch.chunk": np.arange(size)[
            rank * most : (rank + 1) * most
        ],
        "the channels are dealt out one by one, like cards": np.arange(rank, size, ranks),
    }
    if heads:
        each = np.arange(size).reshape(heads, -1)
        takes["whole heads are dealt out one by one, like cards"] = each[rank::ranks].ravel()
    found = {story: whole.take(places, axis=dim) for story, places in takes.items()}
    found["it is not cut at all"] = whole
    found["it is turned by reshape, which mixes rows and columns"] = np.array_split(
        whole.T.reshape(whole.shape), ranks, axis=dim
    )[rank]
    return found | {
        "the other dimension is cut": np.array_split(whole, ranks, axis=whole.ndim - 1 - dim)[rank]
    }


ACTIVATIONS = {
    "gelu is left out": lambda hidden: hidden,
    "gelu is approximated by tanh": lambda hidden: F.gelu(hidden, approximate="tanh"),
    "it is relu, and not gelu": F.relu,
    "it is silu, and not gelu": F.silu,
}


def other_mlps(x: Tensor, slices: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return what comes out of the MLP by mistake, given all ranks' slices."""
    ups = [F.linear(x, each["up.weight"], each["up.bias"]) for each in slices]
    without = [F.linear(x, each["up.weight"]) for each in slices]
    bias = slices[0]["down.bias"]

    def down(hidden: Sequence[Tensor]) -> Tensor:
        products = [one @ each["down.weight"].T for one, each in zip(hidden, slices, strict=True)]
        return torch.stack(products).sum(0)

    right = down([F.gelu(up) for up in ups])
    found = {
        story: down([function(up) for up in ups]) + bias for story, function in ACTIVATIONS.items()
    }
    return found | {
        "up.bias is left out": down([F.gelu(up) for up in without]) + bias,
        "down.bias is left out": right,
        "gelu comes after down, and not before it": F.gelu(down(ups)) + bias,
        "gelu comes once more after down": F.gelu(right) + bias,
        "the sum over the ranks is divided by their number": right / len(slices) + bias,
        "all is divided by the number of ranks": (right + bias) / len(slices),
        "down.bias is multiplied by the number of ranks": right + bias * len(slices),
        "down.bias is divided by the number of ranks": right + bias / len(slices),
        "x is added, as in a residual": right + bias + x,
    }


def other_attentions(
    x: Tensor, slices: Sequence[Mapping[str, Tensor]], heads: int
) -> dict[str, Tensor]:
    """Return what comes out of attention by mistake, given all ranks' slices, of so many heads
    each.
    """
    size = len(slices[0]["query"]) // heads
    names = ("query", "key", "value")

    def attention(
        read: Sequence[str] = names,
        scale: float = size**0.5,
        masked: int | None = 1,
        turned: bool = False,
        back: bool = True,
        axis: int = -1,
    ) -> Tensor:
        total = torch.zeros_like(x)
        for each in slices:
            flat = (x @ each[name].T for name in read)
            split = [
                one.unflatten(-1, (size, -1)).mT if turned else one.unflatten(-1, (-1, size))
                for one in flat
            ]
            q, k, v = (one.transpose(1, 2) for one in split)
            scores = q @ k.transpose(-1, -2) / scale
            if masked is not None:
                later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(masked)
                scores = scores.masked_fill(later, -1e30)
            out = scores.softmax(axis) @ v
            joined = out.transpose(1, 2).flatten(2) if back else out.reshape(*x.shape[:2], -1)
            total = total + joined @ each["output"].T
        return total

    found = {
        "scores are not divided by the root of d": attention(scale=1.0),
        "scores are divided by the root of d twice": attention(scale=float(size)),
        "scores are divided by the root of D, not of d": attention(scale=x.shape[-1] ** 0.5),
        "later tokens are not masked": attention(masked=None),
        "a token does not see itself either": attention(masked=0),
        "heads are not brought back beside each other before the output": attention(back=False),
        "channels are cut into d heads of H, not H of d": attention(turned=True),
        "softmax goes over the queries, not over the keys": attention(axis=-2),
        "the sum over the ranks is divided by their number": attention() / len(slices),
    }
    for read in product(names, repeat=3):
        if read != names:
            found[f"query, key and value are read from {', '.join(read)}"] = attention(read)
    return found


def judge_layer(kind: str) -> Judge:
    """Compare slices, output and gradients with the whole layer's, and what slices keep alive with
    their size.
    """

    def judge(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
        given = case.given[0]
        weights = {name: torch.tensor(given[name], requires_grad=True) for name in CUTS[kind]}
        x = torch.tensor(given["x"], requires_grad=True)
        heads = int(given.get("heads", 0))
        out = whole_mlp(x, weights) if kind == "mlp" else whole_attention(x, weights, heads)
        out.backward(torch.tensor(given["gradient"]))
        every = [
            {name: cut(given[name], case.ranks, dim)[rank] for name, dim in CUTS[kind].items()}
            for rank in range(case.ranks)
        ]
        slices = [{name: torch.tensor(array) for name, array in own.items()} for own in every]
        with torch.no_grad():
            inputs = torch.tensor(given["x"])
            others = (
                other_mlps(inputs, slices)
                if kind == "mlp"
                else other_attentions(inputs, slices, heads // case.ranks)
            )
        for rank, result in enumerate(results):
            for name, dim in CUTS[kind].items():
                instead = wrong_slices(case, rank, given[name], dim)
                found, expected = result[f"the slice of {name}"], every[rank][name]
                others_have = [own[name] for own in every]
                what = f"the slice of {name}"
                contract.expect_equal(
                    rank, what, found, expected, instead=instead, others=others_have
                )
        for rank, result in enumerate(results):
            own, needed = slices[rank], sum(array.nbytes for array in every[rank].values())
            alone = torch.tensor(given["x"], requires_grad=True)
            term = (
                whole_mlp(alone, own)
                if kind == "mlp"
                else whole_attention(alone, own, heads // case.ranks)
            )
            term.backward(torch.tensor(given["gradient"]))
            instead = {"each rank keeps its own term, so g is missing": term.detach().numpy()}
            if kind == "mlp":
                more = out.detach().numpy() + (case.ranks - 1) * given["down.bias"]
                instead["every rank adds down.bias before the sum"] = more
            instead |= {story: value.numpy() for story, value in others.items()}
            contract.expect_close(
                rank, "what forward returns", result["out"], out.detach().numpy(), instead=instead
            )
            for name, dim in CUTS[kind].items():
                gradient = cut(weights[name].grad.numpy(), case.ranks, dim)[rank]
                found = result[f"the gradient of {name}"]
                instead = {
                    "backward of g sums the gradient, which every rank has whole": gradient
                    * case.ranks,
                    "backward divides by the number of ranks": gradient / case.ranks,
                    "it is used on another rank only": 0 * gradient,
                }
                contract.expect_close(
                    rank, f"the gradient of {name}", found, gradient, instead=instead
                )
            instead = {"each rank keeps its own term, so f is missing": alone.grad.numpy()}
            found = result["the gradient of x"]
            contract.expect_close(rank, "the gradient of x", found, x.grad.numpy(), instead=instead)
            if int(result["alive"]) > needed:
                found = f"the slices keep {int(result['alive'])} bytes alive, expected {needed}"
                raise Wrong(f"rank {rank}: {found}: a view keeps all of its matrix")
            if many := int(result["refused"]):
                raise Wrong(
                    f"rank {rank}: {heads} heads on {many} ranks: attention_slices raised no "
                    "ValueError"
                )
        expect_reduced(results, notes, out.numel(), 1, 1)

    return judge

"""Lesson 07, solved: the package's own. Read it in `minidist/tensor.py`, `full/adjoint.py` and
`full/tensor/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from minidist import Communicator
from minidist.full.adjoint import copy_to, reduce_from
from minidist.full.collectives.fast import cut
from minidist.full.model.attention import causal_attention
from minidist.full.tensor.tensor_parallel import Boundary, VocabularyParallelEmbedding
from minidist.full.tensor.vocabulary import vocabulary_parallel_cross_entropy_sum


def mlp_slices(whole: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """Cut the outputs of `up` and the inputs of `down`."""
    counts = cut(len(whole["up.bias"]), ranks)
    return {
        "up.weight": whole["up.weight"].split(counts)[rank].clone(),
        "up.bias": whole["up.bias"].split(counts)[rank].clone(),
        "down.weight": whole["down.weight"].split(counts, dim=1)[rank].clone(),
        "down.bias": whole["down.bias"].clone(),
    }


def parallel_mlp(x: Tensor, mine: Mapping[str, Tensor], comm: Communicator) -> Tensor:
    """Enter, multiply by slices, leave; the bias comes after the sum."""
    hidden = F.gelu(F.linear(copy_to(x, comm), mine["up.weight"], mine["up.bias"]))  # [B, T, C/P]
    return reduce_from(F.linear(hidden, mine["down.weight"]), comm) + mine["down.bias"]


def attention_slices(
    whole: Mapping[str, Tensor], heads: int, rank: int, ranks: int
) -> dict[str, Tensor]:
    """Give each rank its heads."""
    if heads % ranks:
        raise ValueError(f"{heads} heads cannot be dealt out evenly to {ranks} ranks")
    slices = {name: whole[name].chunk(ranks)[rank].clone() for name in ("query", "key", "value")}
    return slices | {"output": whole["output"].chunk(ranks, dim=1)[rank].clone()}


def parallel_attention(
    x: Tensor, mine: Mapping[str, Tensor], head_dim: int, comm: Communicator
) -> Tensor:
    """Enter once, attend with this rank's heads, leave."""
    inside = copy_to(x, comm)
    heads = []
    for name in ("query", "key", "value"):
        channels = F.linear(inside, mine[name])  # [B, T, H/P * d]
        heads.append(channels.view(*x.shape[:2], -1, head_dim).transpose(1, 2))
    found = causal_attention(*heads)  # [B, H/P, T, d]
    return reduce_from(F.linear(found.transpose(1, 2).flatten(2), mine["output"]), comm)


def parallel_embedding(tokens: Tensor, mine: Tensor, vocabulary: int, comm: Communicator) -> Tensor:
    """Look up this rank's words, and sum over the ranks."""
    table: Any = SimpleNamespace(weight=mine, num_embeddings=vocabulary)
    vectors: Tensor = VocabularyParallelEmbedding(table, Boundary(comm))(tokens)
    return vectors


def parallel_cross_entropy(
    logits: Tensor, targets: Tensor, vocabulary: int, comm: Communicator
) -> Tensor:
    """Reduce three numbers for each token."""
    return vocabulary_parallel_cross_entropy_sum(logits, targets, comm, vocabulary) / len(targets)


__all__ = [
    "attention_slices",
    "copy_to",
    "mlp_slices",
    "parallel_attention",
    "parallel_cross_entropy",
    "parallel_embedding",
    "parallel_mlp",
    "reduce_from",
]

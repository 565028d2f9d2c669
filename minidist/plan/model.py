"""What is computed: the sizes of a model, and the operations of one of its layers on one rank.

    Product(m, n, k)        an m x k matrix times a k x n one: 2 m n k operations
    Elements(bytes, back)   element-wise work, bound by what it reads and writes, forward and backward

A layer is two norms, attention and an MLP. Bytes of element-wise work are counted for 16 bits and
fused kernels: a norm reads and writes (4 an element; backward 8), a sum with dropout 7 and 5 (6 and
4 without), GELU 4 and 6, SwiGLU 6 and 10, the loss 16 and 10 for each logit. (Korthikanti et al.
2022, section 4, counts what is stored in the same way.)
"""

import json
import tomllib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from minidist.full.data.files import FileError, at, read_tree, retold, typed
from minidist.full.options import shown
from minidist.plan.config import check_known, sizes_of
from minidist.plan.device import PlanError, entry, ranges


class Product(NamedTuple):
    """An m x k matrix times a k x n one."""

    m: int
    n: int
    k: int


class Elements(NamedTuple):
    """Bytes that element-wise work reads and writes, forward and backward."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Model:
    """The sizes of a model.

    It has `kv` heads of keys and values (0: as many as `heads`), and `ffn` channels in an MLP or an
    expert (0: 4 hidden). A token attends to the `window` tokens before it (0: to all), but in
    `unwindowed` of the layers to all. `parallel`:
    attention and MLP read the same norm. `dropout`: whether the model has any.

    Latent attention keeps `latent` channels of a token, from which all heads' keys and values are
    made, and `rotary` more that all heads share (0: ordinary attention); queries are made from
    `query_latent` channels (0: from hidden). (DeepSeek-V2, 2024, section 2.1.)

    If experts are in `groups`, those of a token are in at most `top_groups` of them (0: in any; DeepSeek-V3,
    2024, section 2.1.2). The first `dense_layers` have no experts but one MLP of `dense_ffn` channels. `predicted` more
    layers and heads predict tokens after the next one (DeepSeek-V3, 2024, section 2.2).
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    kv: int = 0
    ffn: int = 0
    head_dim: int = 0
    gated: bool = True
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    shared: int = 0
    parallel: bool = False
    dropout: bool = False
    window: int = 0
    unwindowed: int = 0
    latent: int = 0
    query_latent: int = 0
    rotary: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    predicted: int = 0
    groups: int = 0
    top_groups: int = 0

    def __post_init__(self) -> None:
        for name, allowed in ranges("model").items():
            value = getattr(self, name)
            with retold(
                PlanError, ValueError, before=f"a model has {name} = {shown(value)}, which "
            ):
                typed(value, *allowed)
        if not self.head_dim and self.hidden % self.heads:
            raise PlanError(
                f"{self.heads} heads do not divide hidden={self.hidden}: change one, or say "
                "head_dim"
            )
        object.__setattr__(self, "kv", self.kv or self.heads)
        object.__setattr__(self, "ffn", self.ffn or 4 * self.hidden)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)
        if self.heads % self.kv:
            shares = "the heads of queries share out those of keys and values evenly"
            raise PlanError(
                f"{self.kv} heads of keys and values do not divide {self.heads} heads: {shares}"
            )
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise PlanError(
                f"top_k={self.top_k} of {self.experts} experts: choose 1 to {self.experts}"
            )
        if self.top_groups > self.groups:
            raise PlanError(
                f"top_groups={self.top_groups} of groups={self.groups}: give at most as many, or "
                "leave both out"
            )
        if self.shared and not self.experts:
            raise PlanError(
                f"{self.shared} shared experts, but no experts: give experts and top_k, or leave "
                "them out"
            )
        if self.dense_layers and not (self.experts and self.dense_ffn):
            raise PlanError(
                f"{self.dense_layers} dense layers lead those with experts: give experts and "
                "dense_ffn, or leave them out"
            )
        if self.unwindowed and not (self.window > 0 and self.unwindowed < self.layers):
            raise PlanError(
                f"{self.unwindowed} of {self.layers} layers have no window of {self.window} tokens: "
                "give window, and fewer"
            )
        if self.dense_layers > self.layers:
            raise PlanError(f"{self.dense_layers} of {self.layers} layers are dense: give fewer")
        if (self.query_latent or self.rotary) and not self.latent:
            raise PlanError(
                f"query_latent={self.query_latent} and rotary={self.rotary} belong to latent "
                "attention: give latent, or leave them out"
            )

    @cached_property
    def leading(self) -> "Model":
        """The model whose layers are all as its leading dense ones."""
        return replace(
            self, experts=0, top_k=0, shared=0, ffn=self.dense_ffn, dense_layers=0, dense_ffn=0
        )

    @cached_property
    def without_window(self) -> "Model":
        """The model whose layers all attend to everything."""
        return replace(self, window=0, unwindowed=0)

    @property
    def key_dim(self) -> int:
        """Channels of a head's query or key; its value has `head_dim`."""
        return self.head_dim + self.rotary

    @cached_property
    def attention(self) -> list[tuple[int, int]]:
        """The matrices of attention in a layer, inputs and outputs of each."""
        values = self.heads * self.head_dim
        if not self.latent:
            keys = self.hidden, self.kv * self.head_dim
            return [(self.hidden, values), keys, keys, (values, self.hidden)]
        found = [(values, self.hidden), (self.hidden, self.latent + self.rotary)]
        found.append((self.latent, 2 * values))
        if self.query_latent:
            found.append((self.hidden, self.query_latent))
        return [*found, (self.query_latent or self.hidden, self.heads * self.key_dim)]

    @property
    def mlp(self) -> list[tuple[int, int]]:
        """The matrices of an MLP, or of an expert."""
        return [(self.hidden, self.ffn)] * (3 if self.gated else 2)

    @cached_property
    def latent_down(self) -> int:
        """Channels that latent attention makes of a token, on every rank along tp."""
        return self.query_latent + self.latent + self.rotary

    @cached_property
    def expert(self) -> int:
        """Parameters of one expert, or of the MLP where there are none."""
        return sum(inputs * outputs for inputs, outputs in self.mlp)

    @property
    def used(self) -> int:
        """Experts that a token goes through; an MLP counts as one."""
        return self.top_k + self.shared if self.experts else 1

    @property
    def alike(self) -> int:
        """Layers behind the leading dense ones."""
        return self.layers - self.dense_layers

    @cached_property
    def layer(self) -> int:
        """Parameters of a layer, with all its experts."""
        return self.layer_with(max(1, self.experts + self.shared))

    def layer_with(self, experts: int) -> int:
        """Return the parameters of a layer with so many experts, and all of its router."""
        projections = sum(inputs * outputs for inputs, outputs in self.attention)
        return projections + self.expert * experts + self.hidden * self.experts

    @property
    def ends(self) -> int:
        """Parameters of the embedding, and of the head unless it is the same."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model, without norms and biases, and without what predicts further."""
        return self.alike * self.layer + self.dense_layers * self.leading.layer + self.ends

    @cached_property
    def active(self) -> int:
        """Parameters that a token is multiplied with: those of the head, not of the embedding, and of
        `top_k` and shared experts.
        """
        leading = self.dense_layers * self.leading.layer
        return self.alike * self.layer_with(self.used) + leading + self.vocabulary * self.hidden

    def flops(self, sequence: int) -> float:
        """Return the operations of a token, forward and backward, without what is recomputed.

        They are 6 for each active parameter, and 12 L s h for attention. Most papers count all
        scores, causal or not (Narayanan et al. 2021, equation 3).
        """
        dims = (self.key_dim + self.head_dim) / 2
        pairs = self.layers * min(sequence, self.window or sequence)
        if self.unwindowed:
            pairs += self.unwindowed * (sequence - min(sequence, self.window))
        return 6 * self.active + 12 * pairs * self.heads * dims

    def products(self, tokens: int, tp: int) -> list[Product]:
        """Return the products of a layer with `tokens` tokens, in order, on one of `tp` ranks, but
        those of routed experts.
        """
        attention = self.products_of_attention(tokens, tp)
        if not self.experts:
            return [*attention, *self.products_of_expert(tokens, self.ffn // tp)]
        found = [*attention, Product(tokens, self.experts, self.hidden)]
        if self.shared:  # each rank along tp has all of them, and computes for its tokens
            found += self.products_of_expert(tokens // tp, self.shared * self.ffn)
        return found

    def products_of_expert(self, rows: int, wide: int) -> list[Product]:
        """Return the products of an MLP, or of an expert, of `wide` channels."""
        inside = (2 if self.gated else 1) * wide
        return [Product(rows, inside, self.hidden), Product(rows, self.hidden, wide)]

    def routed(self, tokens: int, tp: int, ep: int) -> tuple[list[Product], int]:
        """Return the products of each routed expert on one of tp x ep ranks, and how many experts
        that has. The load is balanced: every expert takes the same number of rows.
        """
        if not self.experts:
            return [], 0
        mine = -(-self.experts // (ep * tp))
        rows = max(1, tokens * self.top_k // (tp * mine))
        return self.products_of_expert(rows, self.ffn), mine

    def products_of_attention(self, tokens: int, tp: int) -> list[Product]:
        """Return the products before and after attention's scores, in order."""
        heads = self.heads // tp
        out = Product(tokens, self.hidden, heads * self.head_dim)
        if not self.latent:
            width = (self.heads + 2 * self.kv) * self.head_dim // tp
            return [Product(tokens, width, self.hidden), out]
        # what comes before the latent channels is not cut along tp
        found = [Product(tokens, self.latent_down, self.hidden)]
        found.append(Product(tokens, heads * self.key_dim, self.query_latent or self.hidden))
        found.append(Product(tokens, heads * 2 * self.head_dim, self.latent))
        return [*found, out]

    def cheap(self, tokens: int, tp: int, sp: bool) -> list[float]:
        """Return the bytes that both norms and the activation move forward."""
        whole = tokens * self.hidden / (tp if sp else 1)
        inside = tokens * self.ffn / tp * self.used
        return [4 * whole, 4 * whole, (6 if self.gated else 4) * inside]

    def elements(self, tokens: int, tp: int, sp: bool) -> list[Elements]:
        """Return the element-wise work of a layer on one of `tp` ranks."""
        whole = tokens * self.hidden / (tp if sp else 1)
        inside = tokens * self.ffn / tp * self.used
        add = Elements(7 * whole, 5 * whole) if self.dropout else Elements(6 * whole, 4 * whole)
        mlp = Elements(6 * inside, 10 * inside) if self.gated else Elements(4 * inside, 6 * inside)
        found = [Elements(4 * whole, 8 * whole)] * (1 if self.parallel else 2) + [add, add, mlp]
        if self.gated:  # rotary embedding of queries and keys
            turned = 4 * tokens * (self.heads + self.kv) * self.head_dim / tp
            found.append(Elements(turned, turned))
        if self.experts:  # rows into the order of experts, and back
            moved = 8 * tokens * self.top_k * self.hidden / tp
            found.append(Elements(moved, moved))
        return found


def model(text: str) -> Model:
    """Return a model by its name in `models.toml`, or from a Hugging Face config.json or a TOML of
    ours.

    Raises
    ------
    PlanError
        If the model is unknown, a size is missing or impossible, or the planner does not know this
        kind of layer.
    """
    if not text.endswith((".json", ".toml")):
        return Model(**entry("models", text))
    loads, form = (json.loads, "JSON") if text.endswith(".json") else (tomllib.loads, "TOML")
    with retold(PlanError, FileError, before=f"{text} "):
        tree = read_tree(Path(text), loads, form)
        said = at(tree, "model", kind=dict, default=tree)
        if form == "TOML":
            check_known(said)
        return Model(**sizes_of(said))

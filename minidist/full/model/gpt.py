"""A serial GPT in the style of Llama: it knows nothing of ranks, and every strategy has to
reproduce it.

    tokens [B, T] ─▶ embedding ─▶ x [B, T, D] ─▶ layer 0 ─▶ ... ─▶ layer L-1 ─▶ norm ─▶ head ─▶ logits [B, T, V]

    layer    x ──┬─▶ attention_norm ─▶ attention ─▶ dropout ─▶ + ──┬─▶ mlp_norm ─▶ mlp ─▶ dropout ─▶ + ──▶ x
                 └─────────────────────────────────────────────┘   └─────────────────────────────────┘

    attention    query, key, value ─▶ rotate query and key ─▶ softmax(QKᵀ/√d, causal) V ─▶ output
    mlp          down(silu(gate(x)) * up(x)); or, with experts, that of some of many such (`moe/`)

A strategy changes the model from outside, by the names of its parts: it replaces a linear layer, a
dropout or the function `attention.attend`, or hooks a layer. So attention reads the number of heads
from the shapes it gets, because a rank may hold only some heads. And a layer gets everything that
it depends on (`x`, the rotary table, `where`) as an argument.

Sources: Touvron et al. 2023 (Llama), section 2.2; Zhang & Sennrich 2019 (RMSNorm); Su et al. 2021
(rotary embedding); Shazeer 2020 (SwiGLU); Ainslie et al. 2023 (grouped queries). Weights and
rotation follow Hugging Face's convention.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.full.model.attention import SlidingWindow, causal_attention
from minidist.full.model.config import GPTConfig
from minidist.full.model.dropout import ORIGIN, Dropout, Where
from minidist.full.model.mlp import MLP, linear
from minidist.full.model.moe.routed import MoE

Rotary: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of the rotation at each position, both [T, d/2] for heads of d channels; [B, 1,
T, d/2] if positions differ from row to row.
"""

Attend: TypeAlias = Callable[..., Tensor]
"""Maps queries [B, H, T, d], keys and values [B, H_kv, T, d] to the output of each head [B, H, T,
d]. Where rows have several documents, it is also given where that of each token begins [B, T].
"""


class GPT(nn.Module):
    """The serial model, from tokens to logits.

    Parameters
    ----------
    config : GPTConfig
        Its sizes.
    generator : torch.Generator, optional
        Draws the weights, on the CPU; the same seed gives the same numbers for every dtype and
        device. Without one, a generator with seed 0.
    dtype, device : optional
        The dtype and the device of the parameters; by default torch's. On the device `meta`
        parameters have shapes only, and nothing is drawn.
    """

    def __init__(
        self,
        config: GPTConfig,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        place = torch.device(device or torch.get_default_device())
        # shapes first: torch's own initialisation would draw from the global generator
        with torch.device("meta"):
            self.embedding = nn.Embedding(config.vocabulary, config.hidden)
            self.layers = nn.ModuleList()
            for index in range(config.layers):
                self.layers.append(Layer(config, index))
            self.norm = RMSNorm(config.hidden, config.norm_epsilon)
            self.head = linear(config.hidden, config.vocabulary)
        self.to(dtype)
        self.to_empty(device=place)
        self.tie()
        if place.type != "meta":
            self.initialize(generator or torch.Generator().manual_seed(0))

    def forward(self, tokens: Tensor, where: Where = ORIGIN) -> Tensor:
        """Return the logits [B, T, V] of the token after each of `tokens` [B, T].

        Parameters
        ----------
        tokens : Tensor
            Token ids, int64 [B, T], of T successive positions; T is at most `config.sequence`.
        where : Where
            The rows, positions and step that these tokens have in the serial run.

        Raises
        ------
        ValueError
            If T is too large, or tokens have other than two dims.
        """
        # a later stage of a pipeline is given what the one before it returns
        if tokens.dim() != 2 and not tokens.is_floating_point():
            fix = "give rows of tokens [B, T], such as tokens[None] for a single one."
            raise ValueError(f"tokens are {list(tokens.shape)}, not rows of one length: {fix}")
        time = tokens.shape[1]
        most = self.config.sequence
        if time > most:
            fix = f"cut the batch, or configure sequence={time}."
            raise ValueError(f"{time} tokens in a row, but the model was made for {most}: {fix}")
        x: Tensor = self.embedding(tokens)  # [B, T, D]
        positions = where.position_numbers(time, x.device)
        rotary = self.rotary(where.in_document(positions), x.dtype)
        for layer in self.layers:
            x = layer(x, rotary, where)
        normed = self.norm(x)
        logits: Tensor = self.head(normed)  # [B, T, V]
        return logits

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """Return the rotary table of this model at `positions`, [T] or [B, 1, T]."""
        config = self.config
        return rotary_table(positions, config.head_dim, config.rope_theta, dtype)

    def tie(self) -> None:
        """Let a tied head share the embedding's matrix. Call it again after `to_empty`, which
        separates them.
        """
        if self.config.tied:
            self.head.weight = self.embedding.weight

    def initialize(self, generator: torch.Generator) -> None:
        """Overwrite every parameter with its initial value."""
        self.fill(self.initial_weights(generator))

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite parameters, given by name, with whole weights of any dtype and device, one at a
        time.
        """
        with torch.no_grad():
            for name, weight in weights:
                self.get_parameter(name).copy_(weight)

    def initial_weights(self, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
        """Draw the initial value of each parameter in turn: its name and a float32 tensor on the
        CPU.

        The order is that of `named_parameters`, and only the shapes matter. A rank that holds a
        slice calls this on a model on the device `meta`, and never holds more than one whole
        parameter.

        Matrices are normal with deviation 0.02. Those that write to the residual stream have
        0.02/√(2 * layers), so that the sum of all 2 * layers contributions starts as large as one
        (Radford et al. 2019, GPT-2, section 2.3).

        Raises
        ------
        ValueError
            If the router of such a model would learn nothing.
        """
        self.config.check_learns()
        contributions = 2 * self.config.layers
        for name, parameter in self.named_parameters():
            weight = torch.ones(parameter.shape, device="cpu", dtype=torch.float32)
            if weight.dim() > 1:
                deviation = 0.02
                if name.endswith(("output.weight", "down.weight", "down")):
                    deviation /= contributions**0.5
                weight.normal_(0, deviation, generator=generator)
            yield name, weight


class Layer(nn.Module):
    """One block: attention, then the MLP. Each reads a normalised copy of the residual stream and
    adds to it.
    """

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_epsilon)
        self.attention = Attention(config)
        self.attention_dropout = Dropout(config.dropout, site=2 * index)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_epsilon)
        self.mlp = MoE(config, index) if config.experts else MLP(config.hidden, config.intermediate)
        self.mlp_dropout = Dropout(config.dropout, site=2 * index + 1)

    def forward(self, x: Tensor, rotary: Rotary, where: Where) -> Tensor:
        """Map the residual stream [B, T, D] to the next. It is a pure function, so it can be
        recomputed.
        """
        # No names for what dropout reads: it would live as long as they do.
        attended: Tensor = x + self.attention_dropout(
            self.attention(self.attention_norm(x), rotary, documents=where.documents), where
        )
        mapped: Tensor = attended + self.mlp_dropout(
            self.mlp(self.mlp_norm(attended), where), where
        )
        return mapped


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped queries.

    `attend` is a plain function. A strategy that spreads the sequence over ranks replaces it.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_channels = config.heads * config.head_dim
        key_channels = config.key_value_heads * config.head_dim
        self.query = linear(config.hidden, query_channels)
        self.key = linear(config.hidden, key_channels)
        self.value = linear(config.hidden, key_channels)
        self.output = linear(query_channels, config.hidden)
        window = config.attention_window
        self.attend: Attend = SlidingWindow(window) if window else causal_attention

    def forward(self, x: Tensor, rotary: Rotary, documents: Tensor | None = None) -> Tensor:
        """Let each position of `x` [B, T, D] attend to itself and to earlier positions, of its
        document alone if `documents` [B, T] says where it begins; return [B, T, D].
        """
        query = self.split_heads(self.query(x))  # [B, H, T, d]
        key = self.split_heads(self.key(x))  # [B, H_kv, T, d]
        value = self.split_heads(self.value(x))  # [B, H_kv, T, d]
        query = rotate(query, rotary)
        key = rotate(key, rotary)
        packed = () if documents is None else (documents,)
        found = self.attend(query, key, value, *packed)  # [B, H, T, d]
        side_by_side = found.transpose(1, 2).flatten(2)  # [B, T, H * d]
        mixed: Tensor = self.output(side_by_side)  # [B, T, D]
        return mixed

    def split_heads(self, x: Tensor) -> Tensor:
        """Split the channels of [B, T, n * d] into this rank's n heads: [B, n, T, d]."""
        batch, time, channels = x.shape
        heads = channels // self.head_dim
        split = x.reshape(batch, time, heads, self.head_dim)
        return split.transpose(1, 2)


class RMSNorm(nn.Module):
    """Divide by the root mean square of the channels, and scale each channel by a learned
    weight.
    """

    def __init__(self, channels: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim of `x`, in float32 or better: a sum of squares overflows float16
        early.
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = wide.square().mean(-1, keepdim=True)
        inverse = torch.rsqrt(mean_square + self.epsilon)
        return self.weight * (wide * inverse).to(x.dtype)


def rotary_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Return cosines and sines of position * theta^(-2i/head_dim), both [..., T, head_dim/2].

    The angles are float64: in float32 the angle of position 100,000 can be off by 0.004.
    """
    channels = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    frequencies = theta ** (-channels / head_dim)
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn channel pairs (i, i + d/2) of `x` [B, n, T, d] by the angle of each position.

    The dot product of a turned query and a turned key then depends only on the distance between
    their positions.
    """
    cosine, sine = rotary
    first, second = x.chunk(2, dim=-1)
    turned_first = first * cosine - second * sine
    turned_second = second * cosine + first * sine
    return torch.cat((turned_first, turned_second), dim=-1)


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of -log p(target) over tokens, in nats: a scalar of at least float32.

    It is a sum, because a mean over one rank's tokens would weigh each token by how the batch is
    spread over ranks. The trainer divides by the token count of the whole batch.

    Parameters
    ----------
    logits : Tensor
        [..., V].
    targets : Tensor
        Token ids, int64 [...]; a target of -100 does not count.
    """
    wide_dtype = torch.promote_types(logits.dtype, torch.float32)
    wide = logits.to(wide_dtype)
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="sum")

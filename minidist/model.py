"""A serial GPT in the style of Llama: it knows nothing of ranks, and every strategy reproduces it.

    tokens [B, T] ─▶ embedding ─▶ x [B, T, D] ─▶ layer 0 ─▶ ... ─▶ layer L-1 ─▶ norm ─▶ head ─▶ logits [B, T, V]

    layer    x ──┬─▶ attention_norm ─▶ attention ─▶ + ──┬─▶ mlp_norm ─▶ mlp ─▶ + ──▶ x
                 └──────────────────────────────────┘   └──────────────────────┘

    attention    query, key, value ─▶ rotate query and key ─▶ softmax(QKᵀ/√d, causal) V ─▶ output
    mlp          down(silu(gate(x)) * up(x))

A strategy changes the model from outside: it cuts matrices, hooks layers, or replaces the function
that attention or a norm calls. A rank may hold only some heads, therefore attention reads their
number from the shapes it is given.

Sources: Touvron et al. 2023 (Llama), section 2.2; Zhang & Sennrich 2019 (RMSNorm); Su et al. 2021
(rotary embedding); Shazeer 2020 (SwiGLU); Ainslie et al. 2023 (grouped queries); Radford et al.
2019 (GPT-2), section 2.3 (initial weights). Weights and rotation follow Hugging Face's convention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of the rotation at each position, both [T, d/2] for heads of d channels."""


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT."""

    vocabulary: int = 256  # token ids (V)
    layers: int = 4  # blocks (L)
    hidden: int = 64  # channels (D)
    heads: int = 4  # of attention (H)
    key_value_heads: int = 0  # H_kv; each is shared by H/H_kv heads; 0 means `heads`
    intermediate: int = 0  # of the MLP; 0 means 8/3 * hidden, rounded up to a multiple of 16
    sequence: int = 64  # tokens in a sequence (T)
    rope_theta: float = 10_000.0  # base of the rotary wavelengths
    norm_epsilon: float = 1e-5  # keeps the norm of a zero vector finite
    tied: bool = False  # the head is the matrix of the embedding (Press & Wolf 2017)

    def __post_init__(self) -> None:
        # Three matrices of 8/3 * hidden have as many parameters as the usual two of 4 * hidden.
        inside = self.intermediate or -(-8 * self.hidden // 48) * 16
        kv = self.key_value_heads or self.heads
        object.__setattr__(self, "intermediate", inside)  # the class is frozen
        object.__setattr__(self, "key_value_heads", kv)
        if self.hidden % (2 * self.heads) or self.heads % kv:
            sizes = f"hidden={self.hidden}, heads={self.heads}, key_value_heads={kv}"
            raise ValueError(f"{sizes}: hidden must divide by 2*heads, heads by key_value_heads")

    @property
    def head_dim(self) -> int:
        """Channels of a head (d)."""
        return self.hidden // self.heads


class GPT(nn.Module):
    """The serial model, from tokens to logits; to run, `minidist.full.model.GPT`.

    `seed` draws the weights, on the CPU and in float32: the same numbers for every `dtype`.
    """

    def __init__(
        self, config: GPTConfig, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config = config
        # First shapes alone: torch's own initialisation would draw from the process's generator.
        with torch.device("meta"):
            words = nn.Embedding(config.vocabulary, config.hidden)
            self.embedding: nn.Module = words  # tensor parallelism replaces it
            self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
            self.norm = RMSNorm(config)
            self.head = linear(config.hidden, config.vocabulary)
        self.to(dtype)
        self.to_empty(device="cpu")
        if config.tied:
            self.head.weight = self.get_parameter("embedding.weight")
        self.initialize(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Draw every parameter anew.

        Matrices are normal with deviation 0.02; those that write to the residual stream have
        0.02/√(2L), so that the sum of all 2L contributions starts as large as one.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)
                continue
            deviation = 0.02
            if name.endswith(("output.weight", "down.weight")):
                deviation /= (2 * self.config.layers) ** 0.5
            drawn = torch.empty(parameter.shape, dtype=torch.float32)
            drawn.normal_(0, deviation, generator=generator)
            parameter.copy_(drawn)

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Return the logits [B, T, V] of the token after each of `tokens` [B, T].

        `first` is the position of the first token, on a rank that has a later part of a sequence.
        """
        x: Tensor = self.embedding(tokens)  # [B, T, D]
        length = tokens.shape[1]
        rotary = rotary_table(self.config, first, length, x)
        for layer in self.layers:
            x = layer(x, rotary)
        x = self.norm(x)
        logits: Tensor = self.head(x)  # [B, T, V]
        return logits


class Layer(nn.Module):
    """One block: attention, then the MLP; each adds its output to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Map the residual stream [B, T, D] to the next."""
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped queries."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        channels = config.key_value_heads * config.head_dim  # fewer than D, if heads share them
        self.query = linear(config.hidden, config.hidden)
        self.key = linear(config.hidden, channels)
        self.value = linear(config.hidden, channels)
        self.output = linear(config.hidden, config.hidden)
        self.attend = causal_attention  # ring attention replaces it

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Let each position of `x` [B, T, D] attend to itself and to earlier ones: [B, T, D]."""
        query = rotate(self.split_heads(self.query(x)), rotary)  # [B, H, T, d]
        key = rotate(self.split_heads(self.key(x)), rotary)  # [B, H_kv, T, d]
        value = self.split_heads(self.value(x))  # [B, H_kv, T, d]
        attended = self.attend(query, key, value)  # [B, H, T, d]
        joined = attended.transpose(1, 2).flatten(2)  # [B, T, H * d]
        mixed: Tensor = self.output(joined)  # [B, T, D]
        return mixed

    def split_heads(self, x: Tensor) -> Tensor:
        """Split the channels of [B, T, n * d] into this rank's n heads: [B, n, T, d]."""
        batch, time, channels = x.shape
        heads = channels // self.head_dim
        return x.reshape(batch, time, heads, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU: a linear map, gated channel by channel by the silu of another."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = linear(config.hidden, config.intermediate)
        self.up = linear(config.hidden, config.intermediate)
        self.down = linear(config.intermediate, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map the channels of each position of `x` [B, T, D]."""
        gated = F.silu(self.gate(x)) * self.up(x)
        mapped: Tensor = self.down(gated)
        return mapped


class RMSNorm(nn.Module):
    """Divide by the root mean square of the channels, and scale each channel by a weight."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden))
        self.epsilon = config.norm_epsilon
        self.normalize = rms_norm  # sequence parallelism replaces it

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight, self.epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalise the last dim, in float32 at least: a sum of squares overflows float16 early."""
    wide = widen(x)
    mean_square = wide.square().mean(-1, keepdim=True)
    normed = (wide * torch.rsqrt(mean_square + epsilon)).to(x.dtype)
    return weight * normed


def widen(x: Tensor) -> Tensor:
    """Return `x` in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear map without bias: Llama has none."""
    return nn.Linear(inputs, outputs, bias=False)


def rotary_table(config: GPTConfig, first: int, length: int, like: Tensor) -> Rotary:
    """Return cosines and sines of the positions `first` to `first + length` - 1: [T, d/2] each.

    The angle of channel pair i is position * theta^(-2i/d), in float64: in float32 the angle of
    position 100,000 can be off by 0.004.
    """
    positions = torch.arange(first, first + length, dtype=torch.float64, device=like.device)
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=like.device)
    speeds = config.rope_theta ** (-pairs / config.head_dim)  # radians a position
    angles = torch.outer(positions, speeds)
    return angles.cos().to(like), angles.sin().to(like)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn channel pairs (i, i + d/2) of `x` [B, n, T, d] by the angle of each position.

    The product of a turned query and a turned key then depends only on the distance between them.
    """
    cosine, sine = rotary
    first, second = x.chunk(2, dim=-1)
    turned_first = first * cosine - second * sine
    turned_second = second * cosine + first * sine
    return torch.cat((turned_first, turned_second), dim=-1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return each head's output [B, H, T, d], for queries [B, H, T, d], keys and values [B, H_kv, T, d].

    A position attends to itself and to earlier ones; head h reads key-value head h // (H/H_kv).
    """
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of -log p(target) [nats] over tokens, for logits [..., V], targets [...].

    It is a sum, because a mean over one rank's tokens would weigh each token by how the batch is
    spread over ranks. The trainer divides by the token count of the whole batch.
    """
    by_token = widen(logits).flatten(0, -2)  # [tokens, V]
    return F.cross_entropy(by_token, targets.flatten(), reduction="sum")

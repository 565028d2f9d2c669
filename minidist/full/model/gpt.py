"""The book's GPT (`minidist/model.py`) with dropout, windows, packed documents and experts.

    layer    x ──┬─▶ attention_norm ─▶ attention ─▶ dropout ─▶ + ──┬─▶ mlp_norm ─▶ mlp ─▶ dropout ─▶ + ──▶ x
                 └─────────────────────────────────────────────┘   └─────────────────────────────────┘

Norms, rotation, the split into heads, the MLP and the loss are the book's. With the options off, the
same weights give the same logits and gradients, bit for bit. Weights are drawn in the same order, so
the same seed gives the same model.

A strategy changes the model from outside, by the names of its parts: it replaces a linear layer, a
dropout or the function `attention.attend`, or hooks a layer. So attention reads the number of heads
from the shapes it gets, because a rank may hold only some heads. And a layer gets everything that
it depends on (`x`, the rotary table, `where`) as an argument.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

from minidist import model as book
from minidist.full.model.attention import SlidingWindow, causal_attention
from minidist.full.model.config import GPTConfig
from minidist.full.model.dropout import ORIGIN, Dropout, Where
from minidist.full.model.mlp import MLP, sizes
from minidist.full.model.moe.routed import MoE
from minidist.model import RMSNorm, Rotary, linear, rotate

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
            self.norm = RMSNorm(sizes(config))
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
        plain = sizes(config)
        self.attention_norm = RMSNorm(plain)
        self.attention = Attention(config)
        self.attention_dropout = Dropout(config.dropout, site=2 * index)
        self.mlp_norm = RMSNorm(plain)
        self.mlp = MoE(config, index) if config.experts else MLP(plain)
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


class Attention(book.Attention):
    """The book's attention, which may have a window, and documents packed into a row.

    `attend` is a plain function. A strategy that spreads the sequence over ranks replaces it.
    """

    attend: Attend

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(sizes(config))
        window = config.attention_window
        self.attend = SlidingWindow(window) if window else causal_attention

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


def rotary_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Return cosines and sines of position * theta^(-2i/head_dim), both [..., T, head_dim/2].

    The angles are float64: in float32 the angle of position 100,000 can be off by 0.004.
    """
    channels = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    frequencies = theta ** (-channels / head_dim)
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)

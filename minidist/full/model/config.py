"""The sizes of a GPT, checked once, and what follows from them alone: parameters and FLOPs."""

from collections.abc import Iterator
from dataclasses import dataclass

SCORES = ("softmax", "sigmoid")
BALANCES = ("none", "aux", "bias")


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and switches of a Llama-style GPT.

    Attributes
    ----------
    vocabulary, layers, hidden, heads : int
        Number of token ids (V), of blocks, of channels (D), and of attention heads (H).
    key_value_heads : int
        Heads of keys and values; heads/key_value_heads heads share each (Ainslie et al. 2023). 0
        means `heads`.
    intermediate : int
        Channels inside the MLP. 0 means 8/3 * hidden, rounded up to a multiple of 16: three such
        matrices have as many parameters as two of 4 * hidden (Shazeer 2020).
    sequence : int
        The largest number of tokens (T) in a sequence.
    rope_theta, norm_epsilon : float
        Base of the rotary wavelengths; the number that keeps the norm of a zero vector finite.
    attention_window : int
        A token attends to itself and the attention_window - 1 tokens before it (Jiang et al. 2023);
        0: to all before it.
    dropout : float
        Probability, in training, of zeroing an element that a layer adds to the residual stream.
    tied : bool
        Whether the head reuses the matrix of the embedding (Press & Wolf 2017).
    experts, top_k, shared_experts : int
        Experts in place of each MLP (E; 0: none), how many of them each token is sent to (k), and
        how many more every token goes through. Each expert has `intermediate` channels. See
        `moe/`.
    capacity : float
        An expert takes at most capacity * k * T / E tokens of a sequence of T, the earliest; 0: all
        that come.
    scores : {"softmax", "sigmoid"}
        What the router makes of its products.
    raw_weights : bool
        Whether an expert's output is weighted by its score as it is, or by its share in those of
        the k.
    balance : {"none", "aux", "bias"}
        What keeps the experts evenly loaded: nothing, an auxiliary loss per sequence, or a bias
        that only selects.
    balance_rate, z_loss : float
        Coefficient of the auxiliary loss or, for the bias, its change in a step; coefficient of the
        z-loss.

    Raises
    ------
    ValueError
        If the sizes do not fit together; the message names them and the fix.
    """

    vocabulary: int = 256
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    key_value_heads: int = 0
    intermediate: int = 0
    sequence: int = 256
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    attention_window: int = 0
    dropout: float = 0.0
    tied: bool = False
    experts: int = 0
    top_k: int = 2
    shared_experts: int = 0
    capacity: float = 0.0
    scores: str = "softmax"
    raw_weights: bool = False
    balance: str = "none"
    balance_rate: float = 1e-3
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        """Fill in the derived sizes and refuse what cannot be built."""
        smallest = dict.fromkeys(
            ("vocabulary", "layers", "hidden", "heads", "sequence", "top_k"), 1
        )
        smallest |= dict.fromkeys(
            (
                "key_value_heads",
                "intermediate",
                "attention_window",
                "experts",
                "shared_experts",
            ),
            0,
        )
        for name, least in smallest.items():  # a JSON file may hold a float or a string
            if type(value := getattr(self, name)) is not int or value < least:
                raise ValueError(
                    f"{name}={value!r} is not a whole number of at least {least}: give one."
                )
        # A frozen dataclass can be filled in only through `object`.
        object.__setattr__(self, "key_value_heads", self.key_value_heads or self.heads)
        object.__setattr__(
            self, "intermediate", self.intermediate or _round_up(8 * self.hidden / 3, multiple=16)
        )
        if fault := next(self._faults(), None):
            raise ValueError(fault)

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden // self.heads

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        return self._count(self.experts)

    def _count(self, experts: int) -> int:
        """Return the parameters of the model with so many experts, beside the router and the shared
        ones.
        """
        # query and output, key and value
        heads_of_a_layer = 2 * self.heads + 2 * self.key_value_heads
        attention = self.hidden * self.head_dim * heads_of_a_layer
        mlp = (
            3
            * self.hidden
            * self.intermediate
            * (experts + self.shared_experts if self.experts else 1)
        )
        mlp += self.hidden * self.experts  # the router
        norms = (2 * self.layers + 1) * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (attention + mlp) + norms + embeddings

    def flops_per_token(self, sequence: int = 0) -> int:
        """Return the floating point operations to train on one token, for model FLOPs utilisation.

        6N + 12 * layers * hidden * T: forward multiplies and adds each parameter once, backward
        twice. The same holds for each pair of query and key, and each pair of weight and value. By
        convention causal attention is not discounted, and recomputation is not counted. N leaves
        out an untied embedding, which is looked up, not multiplied, and all experts but k. With a
        window of W tokens, T is at most W. (Chowdhery et al. 2022, PaLM, appendix B.)

        Parameters
        ----------
        sequence : int
            Tokens T per sequence; 0 means the longest sequence of the model.
        """
        looked_up = 0 if self.tied else self.vocabulary * self.hidden
        time = sequence or self.sequence
        attended = min(time, self.attention_window or time)
        attention = 12 * self.layers * self.hidden * attended
        return 6 * (self._count(self.top_k) - looked_up) + attention

    def check_learns(self) -> None:
        """Raise ValueError if a router drawn anew would learn nothing. One that was trained
        elsewhere may be read.
        """
        if self.top_k == 1 and self.experts and not self.raw_weights:
            why = "so the router would learn nothing"
            raise ValueError(
                f"top_k=1 gives every output the weight 1, {why}: use raw_weights=True."
            )

    def _faults(self) -> Iterator[str]:
        """Yield a sentence for heads that do not divide, for a number that makes no sense, and for
        idle options.
        """
        hidden, heads, key_value_heads = self.hidden, self.heads, self.key_value_heads
        if hidden % heads:
            use = (
                f"use hidden={_round_up(hidden, heads)}, or a number of heads that divides "
                f"{hidden}."
            )
            yield (
                f"hidden={hidden} does not divide by heads={heads}: each head takes hidden/heads "
                f"channels; {use}"
            )
        if self.head_dim % 2:
            use = (
                f"the rotary embedding turns pairs; use hidden={_round_up(hidden, 2 * heads)}, or "
                "other heads."
            )
            yield (
                f"{hidden=} and {heads=} make heads of {self.head_dim} channels, an odd number: "
                f"{use}"
            )
        if heads % key_value_heads:
            use = (
                f"as many heads must share each key-value head; use a divisor of {heads}, or 0 "
                "for one each."
            )
            yield f"heads={heads} does not divide by key_value_heads={key_value_heads}: {use}"
        if not 0 <= self.dropout < 1:
            yield f"dropout={self.dropout} is not a probability in [0, 1): use 0 for none."
        if not 0 < self.rope_theta < float("inf"):
            yield f"rope_theta={self.rope_theta} is not a positive number: 10000 is usual."
        if not 0 < self.norm_epsilon < 1:
            yield f"norm_epsilon={self.norm_epsilon} is not a small positive number: 1e-5 is usual."
        if self.scores not in SCORES:
            yield f"scores={self.scores!r} is unknown: choose one of {', '.join(SCORES)}."
        if self.balance not in BALANCES:
            yield f"balance={self.balance!r} is unknown: choose one of {', '.join(BALANCES)}."
        for name in ("capacity", "balance_rate", "z_loss"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                yield f"{name}={value} is not a number of at least 0: use 0 for none."
        if self.experts and self.top_k > self.experts:
            yield (
                f"top_k={self.top_k} is more than experts={self.experts}: send a token to at most "
                "all of them."
            )
        for name in (
            "shared_experts",
            "capacity",
            "raw_weights",
            "balance",
            "z_loss",
            "scores",
            "top_k",
        ):
            if not self.experts and (value := getattr(self, name)) != getattr(GPTConfig, name):
                yield f"{name}={value} is for a model with experts: say how many, or leave it out."
        if self.balance == "none" and self.balance_rate != GPTConfig.balance_rate:
            yield (
                f"balance_rate={self.balance_rate} is for balance='aux' or 'bias': choose one, or "
                "leave it out."
            )


def attended_pairs(time: int, window: int = 0) -> int:
    """Return how many pairs of query and key causal attention computes over `time` tokens.

    They are T (T + 1)/2, and T W - W (W - 1)/2 with a window of W: the first W queries see fewer.
    """
    width = min(time, window or time)
    return time * width - width * (width - 1) // 2


def _round_up(value: float, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -int(-value // multiple) * multiple

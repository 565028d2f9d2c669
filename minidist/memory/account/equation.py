"""What the account should come out at: the formulas of two papers, and the exact count for our own GPT.

    model states   2 + 2 + 12 bytes a parameter         parameters, gradients, Adam        (Rajbhandari et al. 2020)
    activations    sbh (34 + 5as/h) bytes a layer       s tokens, b sequences, h channels, a heads
                                                                                           (Korthikanti et al. 2022)

ZeRO divides the first by the N data-parallel ranks, a category a stage; tensor and sequence parallelism divide the
second by t ranks; flash attention, or selective recomputation, removes the 5as/h: the attention weights.

The 34 are of a GPT with GELU, dropout and 16 bits. A Llama with fused kernels comes to about the same: SwiGLU keeps
three times 8/3 h in place of two times 4h, and has no dropout masks. Ours is unfused, to be read: see `activations_of`.
"""

from __future__ import annotations

from dataclasses import dataclass

from minidist.model import GPTConfig


@dataclass(frozen=True)
class ModelStates:
    """Bytes of a model's parameters, gradients and optimizer state: of one parameter, or of all that a rank holds."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three together."""
        return self.parameters + self.gradients + self.optimizer


MIXED_PRECISION_ADAM = ModelStates(2, 2, 12)
"""16-bit parameters and gradients; master weights, momentum and variance in float32. (ZeRO, section 3.1.)"""

WITHOUT_MASTER_WEIGHTS = ModelStates(2, 2, 8)
"""The same less the float32 master weights: the 16-bit parameters are updated themselves, and lose small updates."""

SINGLE_PRECISION_ADAM = ModelStates(4, 4, 8)
"""Everything in float32: the parameters are their own masters."""


def model_states(
    parameters: float, ranks: int = 1, stage: int = 0, each: ModelStates = MIXED_PRECISION_ADAM
) -> ModelStates:
    """Return the bytes that each of the data-parallel ranks holds. (ZeRO, section 5 and table 1.)

        stage 0   P (2 + 2 + 12)           plain data parallelism
        stage 1   P (2 + 2 + 12/N)         P_os
        stage 2   P (2 + 2/N + 12/N)       P_os+g
        stage 3   P (2/N + 2/N + 12/N)     P_os+g+p

    Parameters
    ----------
    parameters : float
        How many the model has (P).
    ranks, stage : int
        Data-parallel ranks (N), and the stage of ZeRO, 0 to 3.
    each : ModelStates
        Bytes of one parameter.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage} is no stage of ZeRO: use 1, 2 or 3, or 0 for plain data parallelism")
    return ModelStates(
        parameters * each.parameters / (ranks if stage >= 3 else 1),
        parameters * each.gradients / (ranks if stage >= 2 else 1),
        parameters * each.optimizer / (ranks if stage >= 1 else 1),
    )


def layer_activations(
    sequence: int,
    batch: int,
    hidden: int,
    heads: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    attention_weights: bool = True,
) -> float:
    """Return the bytes that one layer of a GPT keeps for backward on each rank. (Korthikanti et al. 2022.)

    equation 1   sbh (34 + 5as/h)              one rank
    equation 2   sbh (10 + 24/t + 5as/(ht))    tensor parallel: the norms, dropouts and inputs stay whole
    equation 4   sbh/t (34 + 5as/h)            and sequence parallel: nothing stays whole
    equation 6   sbh/t (34)                    and without `attention_weights`, which selective recomputation, or
                                               flash attention, computes again
    """
    whole = 10 / (tp if sequence_parallel else 1)
    weights = 5 * heads * sequence / hidden if attention_weights else 0
    return sequence * batch * hidden * (whole + (24 + weights) / tp)


def layer_input(sequence: int, batch: int, hidden: int) -> float:
    """Return the bytes that a layer keeps under full recomputation, its input: 2sbh. (Korthikanti et al., table 2.)"""
    return 2 * sequence * batch * hidden


def layers_in_flight(layers: int, pp: int, microbatches: int, chunks: int = 1) -> float:
    """Return for how many layers the first pipeline stage keeps activations. (Korthikanti et al., section 4.3.)

    1F1B has `pp` microbatches under way there, of layers/pp layers each: those of the whole model (equation 5).
    Interleaving with `chunks` pieces of the model a rank keeps 1 + (pp - 1)/(pp * chunks) times as many.
    """
    interleaved = 1 + (pp - 1) / (pp * chunks) if chunks > 1 else 1
    return -(-layers // pp) * min(pp, microbatches) * interleaved


def embedding_and_loss(
    sequence: int, batch: int, hidden: int, vocabulary: int, tp: int = 1, pp: int = 1, in_flight: int = 1
) -> float:
    """Return the bytes that the first stage keeps outside its layers. (Korthikanti et al., section 4.3.)

    sbh/t for the dropout of the embedding (sequence parallel), for each microbatch under way. Without a pipeline the
    first stage is the last too: 4sbh/t (1 + v/h) for the final norm, the head, and the logits in float32.
    """
    tokens = sequence * batch / tp
    return tokens * hidden * in_flight + (4 * tokens * (hidden + vocabulary) if pp == 1 else 0)


# ---------------------------------------------------------------- our own GPT, to the byte


def layer_activations_of(config: GPTConfig, batch: int, time: int, dtype_bytes: int, flash: bool = True) -> int:
    """Return the bytes that autograd saves in one layer of `minidist.model.GPT`.

    Each line is what `gpt.py` computes, in its order. In 16 bits the norms square a float32 copy of their input. It is
    the count of a CPU; a kernel that writes its heads side by side needs no copy to merge them.

    Parameters
    ----------
    config : GPTConfig
        The model.
    batch, time : int
        Sequences, and tokens in each.
    dtype_bytes : int
        Of an element of parameters and activations: 2, 4 or 8.
    flash : bool
        Whether torch's fused attention runs. Its plain one, which is all that the device `meta` has, keeps the T x T
        weights, and copies of shared keys and values (as it was counted in float32 and float64).
    """
    channels, key_channels = config.hidden, config.key_value_heads * config.head_dim
    tokens, wide_bytes = batch * time, max(4, dtype_bytes)
    norm = wide_bytes * (channels + 1) + dtype_bytes * 2 * channels  # input, 1/root; normalised, scaled: a token
    if flash:
        attention = dtype_bytes * (3 * channels + 2 * key_channels)  # q k v found, and found with the heads merged
        attention += wide_bytes * config.heads  # log-sum-exp
    else:
        attention = dtype_bytes * (4 * channels + config.heads * time)  # q k v merged; weights
    mlp = dtype_bytes * 4 * config.intermediate  # gate, silu(gate), up, and their product
    masks = 2 * channels if config.dropout else 0
    return tokens * (2 * norm + attention + mlp + masks)


def activations_of(config: GPTConfig, batch: int, time: int, dtype_bytes: int, flash: bool = True) -> int:
    """Return the bytes that autograd saves in a forward pass of the model and `cross_entropy_sum`.

    Beside the layers: the rotary table, the final norm, the probabilities, tokens and targets.
    """
    channels, wide_bytes = config.hidden, max(4, dtype_bytes)
    norm = wide_bytes * (channels + 1) + dtype_bytes * 2 * channels
    ends = batch * time * (norm + wide_bytes * config.vocabulary + 2 * 8) + time * config.head_dim * dtype_bytes
    return config.layers * layer_activations_of(config, batch, time, dtype_bytes, flash) + ends

"""What the account should show: the formulas of two papers, and the exact count for our own GPT.

    model states   2 + 2 + 12 bytes a parameter         parameters, gradients, Adam        (Rajbhandari et al. 2020)
    activations    sbh (34 + 5as/h) bytes a layer       s tokens, b sequences, h channels, a heads
                                                                                           (Korthikanti et al. 2022)

Each stage of ZeRO divides one more category of model states by the N data-parallel ranks. Tensor and sequence
parallelism divide the activations by t ranks. Flash attention, or selective recomputation, removes the attention
weights, 5as/h.

The 34 bytes are those of a GPT with GELU, dropout and 16 bits. A Llama with fused kernels needs about as many: SwiGLU
saves three times 8/3 h instead of two times 4h, and there are no dropout masks. Our GPT is not fused, because it is
meant to be read: `activations_of` counts it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minidist.model import GPTConfig


@dataclass(frozen=True)
class ModelStates:
    """Bytes of parameters, gradients and optimizer state: for one parameter, or for all parameters of a rank."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three together."""
        return self.parameters + self.gradients + self.optimizer


MIXED_PRECISION_ADAM = ModelStates(2, 2, 12)
"""16-bit parameters and gradients; master weights, momentum and variance in float32. (ZeRO, section 3.1.)"""

SINGLE_PRECISION_ADAM = ModelStates(4, 4, 8)
"""Everything in float32: the parameters are their own masters."""


def model_states(
    parameters: float, ranks: int = 1, stage: int = 0, each: ModelStates = MIXED_PRECISION_ADAM
) -> ModelStates:
    """Return the bytes that each data-parallel rank holds. (ZeRO, section 5 and table 1.)

        stage 0   P (2 + 2 + 12)           plain data parallelism
        stage 1   P (2 + 2 + 12/N)         P_os
        stage 2   P (2 + 2/N + 12/N)       P_os+g
        stage 3   P (2/N + 2/N + 12/N)     P_os+g+p

    Parameters
    ----------
    parameters : float
        Number of parameters of the model (P).
    ranks, stage : int
        Number of data-parallel ranks (N), and the stage of ZeRO, 0 to 3.
    each : ModelStates
        Bytes for one parameter.

    Raises
    ------
    ValueError
        If there is no such stage.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage} is no stage of ZeRO: use 1, 2 or 3, or 0 for plain data parallelism")
    return ModelStates(
        parameters * each.parameters / (ranks if stage >= 3 else 1),
        parameters * each.gradients / (ranks if stage >= 2 else 1),
        parameters * each.optimizer / (ranks if stage >= 1 else 1),
    )


def adapted_states(
    config: GPTConfig, rank: int, nf4: bool, ranks: int = 1, stage: int = 0, each: ModelStates = MIXED_PRECISION_ADAM
) -> ModelStates:
    """Return the bytes of our GPT with adapters, as `add_lora` puts them beside its layers, or `add_qlora` (`nf4`).

    Frozen parameters have neither gradients nor state. In NF4 a matrix takes 4 + 8/64 + 32/(64 * 256) bits a weight,
    and four bytes for its mean. (Hu et al. 2021; Dettmers et al. 2023.) Other parameters as for `model_states`.
    """
    matrices = layer_matrices(config)
    beside = [*matrices.values()] if nf4 else [matrices["query"], matrices["value"]]
    stored = sum(-(-n // 2) - (-n // 64) - 4 * (-n // (64 * 256)) + 4 for n in (i * o for i, o in beside)) if nf4 else 0
    wide = config.parameter_count - config.layers * nf4 * sum(i * o for i, o in beside)
    trained = model_states(config.layers * rank * sum(i + o for i, o in beside), ranks, stage, each)
    frozen = (config.layers * stored + wide * each.parameters) / (ranks if stage == 3 else 1)
    return replace(trained, parameters=trained.parameters + frozen)


def layer_matrices(config: GPTConfig) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of each linear layer in a block of our GPT."""
    model, inside = config.hidden, config.intermediate
    queries, keys = config.heads * config.head_dim, config.key_value_heads * config.head_dim
    attention = {"query": (model, queries), "key": (model, keys), "value": (model, keys), "output": (queries, model)}
    return attention | {"gate": (model, inside), "up": (model, inside), "down": (inside, model)}


def layer_activations(
    sequence: int,
    batch: int,
    hidden: int,
    heads: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    attention_weights: bool = True,
) -> float:
    """Return the bytes that each rank saves for backward in one layer of a GPT. (Korthikanti et al. 2022.)

    equation 1   sbh (34 + 5as/h)              one rank
    equation 2   sbh (10 + 24/t + 5as/(ht))    tensor parallel: the norms, dropouts and inputs stay whole
    equation 4   sbh/t (34 + 5as/h)            and sequence parallel: nothing stays whole
    equation 6   sbh/t (34)                    and without `attention_weights`: selective recomputation or flash
                                               attention computes them again
    """
    whole = 10 / (tp if sequence_parallel else 1)
    weights = 5 * heads * sequence / hidden if attention_weights else 0
    return sequence * batch * hidden * (whole + (24 + weights) / tp)


def layer_input(sequence: int, batch: int, hidden: int) -> float:
    """Return the bytes of a layer's input, all that full recomputation saves: 2sbh. (Korthikanti et al., table 2.)"""
    return 2 * sequence * batch * hidden


def layers_in_flight(layers: int, pp: int, microbatches: int) -> int:
    """Return for how many layers the first pipeline stage holds activations. (Korthikanti et al., section 4.3.)

    1F1B has `pp` microbatches in flight there, each with the activations of layers/pp layers: together as many as the
    whole model has layers (equation 5).
    """
    return -(-layers // pp) * min(pp, microbatches)


def embedding_and_loss(
    sequence: int, batch: int, hidden: int, vocabulary: int, tp: int = 1, pp: int = 1, in_flight: int = 1
) -> float:
    """Return the bytes that the first stage saves outside its layers. (Korthikanti et al., section 4.3.)

    Each microbatch in flight takes sbh/t for the dropout of the embedding (sequence parallel). Without a pipeline the
    first stage is the last too, and 4sbh/t (1 + v/h) come on top: the final norm, the head, and the logits in float32.
    """
    tokens = sequence * batch / tp
    return tokens * hidden * in_flight + (4 * tokens * (hidden + vocabulary) if pp == 1 else 0)


# ---------------------------------------------------------------- our own GPT, to the byte


def layer_activations_of(
    config: GPTConfig, batch: int, time: int, dtype_bytes: int, flash: bool = True, fp8: bool = False
) -> int:
    """Return the bytes that autograd saves in one layer of `minidist.model.GPT`.

    Each line stands for what `gpt.py` computes, in the same order. In 16 bits the norms square a float32 copy of their
    input. The count holds for a CPU: a GPU kernel that writes its heads side by side needs no copy to merge them.

    Parameters
    ----------
    config : GPTConfig
        The model.
    batch, time : int
        Sequences, and tokens in each.
    dtype_bytes : int
        Bytes of one element of parameters and activations: 2, 4 or 8.
    flash : bool
        Whether torch's fused attention runs. The plain one, the only one on the device `meta`, saves the T x T weights,
        and copies of shared keys and values (counted in float32 and float64).
    fp8 : bool
        Whether products are in 8 bits: each saves its input and its weight in these, and two scales.
    """
    channels, key_channels = config.hidden, config.key_value_heads * config.head_dim
    tokens, wide_bytes = batch * time, max(4, dtype_bytes)
    # Bytes of each token.
    norm = wide_bytes * (channels + 1) + dtype_bytes * 2 * channels  # input and 1/root; normalised and scaled
    if flash:
        attention = dtype_bytes * (3 * channels + 2 * key_channels)  # q, k, v, found; found with its heads merged
        attention += wide_bytes * config.heads  # log-sum-exp
    else:
        attention = dtype_bytes * (4 * channels + config.heads * time)  # q, k, v, found, merged; the weights
    mlp = dtype_bytes * 4 * config.intermediate  # gate, silu(gate), up, and their product
    masks = 2 * channels if config.dropout else 0
    kept = tokens * (2 * norm + attention + mlp + masks)
    if fp8:
        products = layer_matrices(config).values()
        kept -= tokens * dtype_bytes * (3 * channels + config.intermediate)  # what only products read
        kept += sum(inputs * (tokens + outputs) + 2 * 4 for inputs, outputs in products)
    return kept


def activations_of(
    config: GPTConfig, batch: int, time: int, dtype_bytes: int, flash: bool = True, fp8: bool = False
) -> int:
    """Return the bytes that autograd saves in a forward pass of the model and `cross_entropy_sum`.

    Besides the layers: the rotary table, the final norm, the probabilities, the tokens and the targets. Parameters as
    for `layer_activations_of`.
    """
    channels, wide_bytes = config.hidden, max(4, dtype_bytes)
    norm = wide_bytes * (channels + 1) + dtype_bytes * 2 * channels
    ends = batch * time * (norm + wide_bytes * config.vocabulary + 2 * 8) + time * config.head_dim * dtype_bytes
    return config.layers * layer_activations_of(config, batch, time, dtype_bytes, flash, fp8) + ends

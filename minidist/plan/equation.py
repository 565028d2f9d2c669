"""The formulas of two papers for the bytes of training.

    model states   2 + 2 + 12 bytes a parameter         parameters, gradients, Adam        (Rajbhandari et al. 2020)
    activations    sbh (34 + 5as/h) bytes a layer       s tokens, b sequences, h channels, a heads
                                                                                           (Korthikanti et al. 2022)

Each stage of ZeRO divides one more category of model states by the N data-parallel ranks. Tensor
and sequence parallelism divide the activations by t ranks. Flash attention, or selective
recomputation, removes the attention weights, 5as/h.

The 34 bytes are those of a GPT with GELU, dropout and 16 bits. A Llama with fused kernels needs
about as many: SwiGLU saves three times 8/3 h instead of two times 4h, and there are no dropout
masks. Our GPT saves more, because it is not fused: it is meant to be read.
"""

from dataclasses import dataclass, replace

from minidist.full.model import GPTConfig


@dataclass(frozen=True)
class ModelStates:
    """Bytes of parameters, gradients and optimizer state: for one parameter, or for all parameters
    of a rank.
    """

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three together."""
        return self.parameters + self.gradients + self.optimizer


MIXED_PRECISION_ADAM = ModelStates(2, 2, 12)
"""16-bit parameters and gradients; master weights, momentum and variance in float32. (ZeRO, section
3.1.)
"""

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
        If ZeRO does not have this stage.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(
            f"stage={stage} is not a stage of ZeRO: use 1, 2 or 3, or 0 for plain data parallelism"
        )
    return ModelStates(
        parameters * each.parameters / (ranks if stage >= 3 else 1),
        parameters * each.gradients / (ranks if stage >= 2 else 1),
        parameters * each.optimizer / (ranks if stage >= 1 else 1),
    )


def adapted_states(
    config: GPTConfig,
    rank: int,
    nf4: bool,
    ranks: int = 1,
    stage: int = 0,
    each: ModelStates = MIXED_PRECISION_ADAM,
) -> ModelStates:
    """Return the bytes of our GPT with adapters, as `add_lora` puts them beside its layers, or
    `add_qlora` (`nf4`).

    Frozen parameters have neither gradients nor state. The other parameters are as for
    `model_states`. (Hu et al. 2021; Dettmers et al. 2023.)
    """
    matrices = layer_matrices(config)
    beside = [*matrices.values()] if nf4 else [matrices["query"], matrices["value"]]
    # first what is trained: two adapters a matrix
    adapters = 0
    for inputs, outputs in beside:
        adapters += rank * (inputs + outputs)
    trained = model_states(config.layers * adapters, ranks, stage, each)
    # then what is frozen: in NF4 the matrices, in the width of `each` the rest
    wide = config.parameter_count
    stored = 0
    if nf4:
        for inputs, outputs in beside:
            weights = inputs * outputs
            wide -= config.layers * weights
            stored += nf4_bytes(weights)
    frozen = config.layers * stored + wide * each.parameters
    if stage == 3:
        frozen /= ranks
    return replace(trained, parameters=trained.parameters + frozen)


def nf4_bytes(weights: int) -> int:
    """Return the bytes of a matrix in NF4: 4 bits a weight, a scale of 8 bits for each 64 weights, a
    scale of 32 bits for each 256 of those, and their mean in 32 bits.
    """
    codes = -(-weights // 2)
    scales = -(-weights // 64)
    scales_of_scales = -(-weights // (64 * 256))
    return codes + scales + 4 * scales_of_scales + 4


def layer_matrices(config: GPTConfig) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of each linear layer in a block of our GPT."""
    model, inside = config.hidden, config.intermediate
    queries, keys = config.heads * config.head_dim, config.key_value_heads * config.head_dim
    attention = {
        "query": (model, queries),
        "key": (model, keys),
        "value": (model, keys),
        "output": (queries, model),
    }
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
    """Return the bytes that each rank saves for backward in one layer of a GPT. (Korthikanti et al.
    2022.)

    equation 1   sbh (34 + 5as/h)              one rank
    equation 2   sbh (10 + 24/t + 5as/(ht))    tensor parallel: each rank keeps all of norms, dropouts and inputs
    equation 4   sbh/t (34 + 5as/h)            and sequence parallel: each rank keeps 1/t of everything
    equation 6   sbh/t (34)                    and without `attention_weights`: selective recomputation or flash
                                               attention computes them again
    """
    undivided = 10 / (tp if sequence_parallel else 1)
    weights = 5 * heads * sequence / hidden if attention_weights else 0
    bytes_an_element = undivided + (24 + weights) / tp
    return sequence * batch * hidden * bytes_an_element


def layer_input(sequence: int, batch: int, hidden: int) -> float:
    """Return the bytes of a layer's input, all that full recomputation saves: 2sbh. (Korthikanti et
    al., table 2.)
    """
    return 2 * sequence * batch * hidden

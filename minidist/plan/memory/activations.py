"""What a layer keeps of a microbatch for backward, and what it needs while it is at work.

Four kinds of layers keep different tensors:

    GPT             as counted by Korthikanti et al. 2022, equations 1 to 4
    Llama           of torch's operations, each with its own inputs: gate, up, SiLU of the gate, and their product
    Megatron Core   `engine.py`, any model
    XLA             what products return, and the layer's input: norms and activations are computed again in the kernels
                    that read them (MaxText, remat_policy "minimal")

Autocast: 32 bits between products, and 16-bit copies of what these read.
"""

from typing import NamedTuple

from minidist.plan.device import PlanError
from minidist.plan.equation import layer_activations
from minidist.plan.memory import engine
from minidist.plan.run import Setup, once


class Layer(NamedTuple):
    """Bytes of a layer and a microbatch: `saved` until its backward, and `working` beside them while
    that goes on.
    """

    saved: float
    working: float


@once
def layer_of(run: Setup) -> Layer:
    """Return the bytes of one of the run's layers, and a microbatch."""
    everything, every_other_product = needed(run)
    scores = 0.0
    if run.software.kernel == "unfused":
        queries = run.sequence // run.cp
        scores = 5 * run.model.heads / run.tp * queries * run.sequence * run.share.batch
    entry = entry_bytes(run)
    if run.recompute == "parts":
        if not run.software.engine:
            raise PlanError(f"recompute=parts is not known of {run.software.name}: choose full")
        again = engine.computed_again(run)
        return Layer(everything - again, again)
    saved = {
        "none": everything + scores,
        "selective": everything,
        "op": every_other_product,
        "half": (everything + entry) / 2,
        "full": entry,
    }[run.recompute]
    return Layer(saved, everything + scores - saved)


def entry_bytes(run: Setup) -> float:
    """Return the bytes of a layer's input on a rank."""
    width = 4 if run.autocast else 2
    return width * run.share.tokens * run.model.hidden / run.whole


def needed(run: Setup) -> tuple[float, float]:
    """Return the bytes that backward needs of a layer, without scores: all of them, and those that
    the policy "op" keeps.
    """
    model, tp, tokens = run.model, run.tp, run.share.tokens
    if run.software.engine:
        everything = engine.kept(run)
        return everything, everything / 2
    if run.software.compiler:
        everything = returned_by_products(run)
        return everything, everything / 2
    if not model.gated:
        queries, batch = run.sequence // run.cp, run.share.batch
        everything = layer_activations(
            queries, batch, model.hidden, model.heads, tp, run.sp, attention_weights=False
        )
        if not model.dropout:  # nor its two masks
            everything -= 2 * tokens * model.hidden / (tp if run.sp else 1)
        return everything, everything / 2
    # norms and sums: without sequence parallelism each rank along tp has all of them
    between = 8 * tokens * model.hidden / (tp if run.sp else 1)
    outputs = 4 * (model.heads + model.kv) * model.head_dim
    if run.autocast:  # of what two norms return, five copies for products, by all tokens
        between += 10 * tokens * model.hidden
    everything = between + tokens * (outputs + 8 * model.ffn * model.used) / tp
    return everything, every_other(run)


def every_other(run: Setup) -> float:
    """Return the bytes that torchtitan's policy "op" keeps of a Llama's layer: its input, what every
    other product returns (queries, values, the gate, the last), and attention's output.
    """
    model = run.model
    between = 2 * model.hidden / run.whole
    inside = (2 * model.heads + model.kv) * model.head_dim + model.ffn * model.used
    return 2 * run.share.tokens * (between + inside / run.tp)


def returned_by_products(run: Setup) -> float:
    """Return the bytes of a layer's input and of what each of its products returns."""
    model = run.model
    between = 3 * model.hidden / run.whole  # in, after attention, after the MLP
    inside = (model.heads + 2 * model.kv) * model.head_dim
    inside += (2 if model.gated else 1) * model.ffn * model.used
    return 2 * run.share.tokens * (between + inside / run.tp)

"""The bytes of what a rank has of weights, gradients and optimizer. (ZeRO, table 1.)

    weights, gradients, optimizer   bytes a parameter. Some frameworks keep a copy of their own
                   (autocast: 4 + 4 + 8 bytes, nothing in 16 bits beside)
    gathered       layers that ZeRO 3 brings together while they are at work

Products of 8 bits change none of them: a weight of 8 bits is held twice, by rows and by columns, as
backward reads it, and that is 2 bytes again. (Transformer Engine, "Performance considerations:
handling transposes"; on Blackwell one scale for a whole tensor needs one copy, which is not counted.)
"""

from minidist.plan.memory.parameters import parts_of, table_parameters
from minidist.plan.run import Setup


def states(
    run: Setup, layers: int, tables: int, leading: int = 0, others: float = 0.0
) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer of some layers, of which `leading` are
    dense, of `tables` (embedding, head), and of `others`, parameters that stand between those.
    """
    weights = gradients = optimizer = 0.0
    ends = tables * table_parameters(run) + others
    for count, same in parts_of(run, layers, ends, leading):
        each = state_bytes(run, same.ranks)
        weights += count * each[0]
        gradients += count * each[1]
        optimizer += count * each[2]
    return weights, gradients, optimizer


def state_bytes(run: Setup, ranks: int) -> tuple[float, float, float]:
    """Return bytes of weights, gradients and optimizer for one parameter, which ZeRO shards over
    `ranks`.

    (ZeRO, table 1, and the software's own copies.)
    """
    software = run.software
    whole = software.parameters > 0 or run.autocast
    if run.zero == 3 and not whole:
        # The sharded masters are the parameters. A pipeline keeps the gathered ones in 16 bits, too.
        if run.offload:
            return 2 / ranks, 2 / ranks, 0.0
        pipelined = run.pp > 1
        return 4 / ranks + 2 * pipelined, 4 / ranks + 4 * pipelined, 8 / ranks
    weights, optimizer = software.parameters, software.optimizer
    is_deepspeed = run.zero > 0 and not software.rails
    if run.autocast:
        weights, optimizer = 4, 8
    elif is_deepspeed and run.gradients == 4:
        weights += 2  # it keeps parameters in both precisions
    if run.offload:
        optimizer = 0
    of_weights = ranks if run.zero == 3 else 1
    of_gradients = ranks if run.zero >= 2 and run.reductions == 1 else 1
    of_optimizer = ranks if run.zero else 1
    return weights / of_weights, run.gradients / of_gradients, optimizer / of_optimizer


def gathered(run: Setup) -> float:
    """Return the bytes that ZeRO 3 gathers: two layers at a time with their gradients, and tables.

    Experts without copies are never sharded, so they are not gathered either.
    """
    parameters = 0.0
    for count, same in run.parts:
        if same.ranks > 1 or run.ep == 1:
            parameters += count
    inputs = 4 * run.share.tokens * run.model.hidden if run.tp > 1 else 0
    wide = 2 if run.autocast else 1
    return wide * (8 * parameters + 4 * table_parameters(run)) + inputs

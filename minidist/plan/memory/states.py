"""Which parameters a rank has, which ranks have the same ones, and the bytes of their weights,
gradients and optimizer. (ZeRO, table 1.)

    weights, gradients, optimizer   bytes a parameter. Some frameworks keep a copy of their own
                   (autocast: 4 + 4 + 8 bytes, nothing in 16 bits beside)
    gathered       layers that ZeRO 3 brings together while they are at work

Products of 8 bits change none of them: a weight of 8 bits is held twice, by rows and by columns, as
backward reads it, and that is 2 bytes again. (Transformer Engine, "Performance considerations:
handling transposes"; on Blackwell one scale for a whole tensor needs one copy, which is not counted.)
"""

from collections.abc import Sequence
from typing import TypeAlias

from minidist.plan.links import Group
from minidist.plan.run import Setup

Parts: TypeAlias = Sequence[tuple[float, Group]]
"""Parameters on a rank, each with the ranks that have the same ones."""

MOMENTS = {"adamw": 8.0, "adamw-16": 4.0, "muon": 4.0}
"""Bytes a parameter that an optimizer keeps beside masters: two moments, in 32 bits or in 16, or Muon's
momentum. Where that is, embedding and head have AdamW's two.
"""


def table_parameters(run: Setup) -> float:
    """Return the parameters of the embedding, or of the head, on each rank along tp."""
    return run.model.vocabulary * run.model.hidden / run.tp


def ends_parameters(run: Setup) -> float:
    """Return the parameters of embedding and head on a rank whose stage has either."""
    on_one_rank = run.rank_of[-1] == 0 and not run.model.tied
    return table_parameters(run) * (2 if on_one_rank else 1)


def parts_of(run: Setup, layers: float, ends: float, leading: float = 0.0) -> Parts:
    """Return the parameters of so many layers and of the ends on this rank, each with the ranks
    that have the same ones. `leading` of the layers are dense ones.
    """
    (dense, same), *routed = run.parts
    alike = layers - leading
    of_leading = leading * run.leading.dense_layer if leading else 0.0
    parts = [(alike * dense + of_leading + ends, same)]
    for count, copies in routed:
        parts.append((alike * count, copies))
    return parts


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
    if run.optimizer == "muon" and not run.offload:
        more = ends * (MOMENTS["adamw"] - MOMENTS["muon"])
        optimizer += more / (run.sharded.ranks if run.zero else 1)
    return weights, gradients, optimizer


def state_bytes(run: Setup, ranks: int) -> tuple[float, float, float]:
    """Return bytes of weights, gradients and optimizer for one parameter, which ZeRO shards over
    `ranks`.

    (ZeRO, table 1, and the software's own copies.)
    """
    software, moments = run.software, MOMENTS[run.optimizer]
    whole = software.parameters > 0 or run.autocast
    if run.zero == 3 and not whole:
        # The sharded masters are the parameters. A pipeline keeps the gathered ones in 16 bits, too.
        if run.offload:
            return 2 / ranks, 2 / ranks, 0.0
        pipelined = run.pp > 1
        return 4 / ranks + 2 * pipelined, 4 / ranks + 4 * pipelined, moments / ranks
    weights = software.parameters
    optimizer = software.optimizer - MOMENTS["adamw"] + moments
    is_deepspeed = run.zero > 0 and not software.rails
    if run.autocast:
        weights, optimizer = 4, moments
    elif is_deepspeed and run.gradients == 4:
        weights += 2  # it keeps parameters in both precisions
    if run.offload:
        optimizer = 0
    of_weights = ranks if run.zero == 3 else 1
    of_optimizer = ranks if run.zero else 1
    return weights / of_weights, gradient_bytes(run, ranks), optimizer / of_optimizer


def gradient_bytes(run: Setup, ranks: int) -> float:
    """Return the bytes of a parameter's gradient: whole, or 1/ranks of it where each is reduced when
    it is there.

    ZeRO 2 in an interleaved pipeline reduces those of a chunk after its microbatches in a row; whole
    are those of the chunk at work, and of the one being reduced.
    """
    if run.zero < 2:
        return run.gradients
    if run.reductions == 1:
        return run.gradients / ranks
    whole = min(1.0, 2 / run.chunks) if run.zero == 2 and run.chunks > 1 else 1.0
    return run.gradients * max(whole, 1 / ranks)


def gathered(run: Setup) -> float:
    """Return the bytes that ZeRO 3 gathers: two layers at a time with their gradients, and tables; a
    compiler gathers the weights of two products at a time.

    Experts without copies are never sharded, so they are not gathered either.
    """
    parameters = 0.0
    for count, same in run.parts:
        if same.ranks > 1 or run.ep == 1:
            parameters += count
    if run.software.compiler:
        parameters = min(parameters, largest_product(run))
    inputs = 4 * run.share.tokens * run.model.hidden if run.tp > 1 else 0
    wide = 2 if run.autocast else 1
    return wide * (8 * parameters + 4 * table_parameters(run)) + inputs


def largest_product(run: Setup) -> float:
    """Return the weights on a rank of the largest product of a layer: of all its experts, if it has
    them.
    """
    model = run.model
    attention = model.heads * model.head_dim / run.tp
    if model.experts:
        experts = run.own_experts / model.expert
        return model.hidden * max(attention, experts * model.ffn)
    return model.hidden * max(attention, model.ffn / run.tp)

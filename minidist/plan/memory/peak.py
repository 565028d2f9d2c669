"""What the fullest GPU holds at its peak, by category.

    parameters, gradients, optimizer   `states.py`
    activations    what the microbatches in flight keep, and what a layer or the head needs beside them at work
    logits         where the head is
    communication  gathered layers
    workspace      of the software: placeholders of gradients, and cuBLAS's
    resident       what the driver sees beside tensors: context, NCCL's buffers, fragmentation

Megatron Core's peak is at one of three moments: a layer's backward, the head's backward when nothing
of the microbatch has been given back yet, or the embedding's, whose gradient is as large as itself
(`engine.py`). For other software what the three need is added up.
"""

import math

from minidist.plan.memory import engine
from minidist.plan.memory.activations import Layer, entry_bytes, layer_of
from minidist.plan.memory.flight import deferred, in_flight
from minidist.plan.memory.states import gathered, states, table_parameters
from minidist.plan.run import Setup

GB = 1e9
Bytes = dict[str, float]


def bytes_held(run: Setup, room: float = math.inf) -> Bytes:
    """Return the bytes by category of the fullest GPU at its peak; or of any that holds more than
    `room`, if all that is asked is whether one does.
    """
    # The first stage has the embedding and most microbatches, the last one the head. The second
    # can hold more than the first, whose embedding may count as a layer; so can the longest.
    last = run.pp - 1
    layers = run.layers()
    stages = {0, min(1, last), last, layers.index(max(layers))}
    found = []
    for stage in sorted(stages):
        bytes = bytes_of_stage(run, stage)
        if sum(bytes.values()) > room:
            return bytes
        found.append(bytes)
    return max(found, key=lambda bytes: sum(bytes.values()))


def metered(run: Setup, meter: str = "") -> Bytes:
    """Return what a meter sees of these bytes; by default the one that the run's software reads.

    driver      everything
    allocated   tensors alone (torch.cuda.max_memory_allocated)
    reserved    and what the allocator holds for others (torch.cuda.max_memory_reserved)
    """
    held = bytes_held(run)
    meter = meter or run.software.measured
    if meter == "driver":
        return held
    held["resident"] = 0.0
    if meter == "reserved":
        held["resident"] = sum(held.values()) * run.known["reserved"]
    return held


def bytes_of_stage(run: Setup, stage: int) -> Bytes:
    """Return the bytes by category of a GPU of a stage at its peak."""
    model = run.model
    is_last = stage == run.rank_of[-1]
    further = model.predicted if is_last else 0  # each behind a product of two inputs
    layers = math.ceil(run.layers()[stage])
    has_own_head = is_last and not (model.tied and stage == 0)
    tables = (stage == 0) + has_own_head
    leading = run.leading_layers(stage)
    joining = further * 2 * model.hidden**2 / run.tp
    of_states = states(run, layers, tables, math.ceil(leading), joining)
    weights, gradients, optimizer = of_states
    logits = 0.0
    if is_last and not run.fused_loss:
        columns = -(-model.vocabulary // run.tp)
        heads = 1 + further
        logits = heads * run.share.tokens * columns * run.software.kept_logit
    layer = mean_layer(run, stage, leading)
    kept = in_flight(run, stage) * layer.saved
    kept += deferred(run, stage) * layer.working
    busy, logits, workspace = at_work(run, stage, layer, logits)
    return {
        "parameters": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": kept + busy,
        "logits": logits,
        "communication": gathered(run) if run.zero == 3 else 0.0,
        "workspace": workspace,
        "resident": resident(run),
    }


def resident(run: Setup) -> float:
    """Return the bytes that a GPU's driver sees beside tensors; other devices have no such driver."""
    if run.machine.device.generation in ("tpu", "trainium"):
        return 0.0
    return run.known["resident"] * GB


def mean_layer(run: Setup, stage: int, leading: float) -> Layer:
    """Return the bytes of a stage's mean layer, of which `leading` are dense ones."""
    alike = with_copies(run, layer_of(run))
    layers = run.layers()[stage]
    if not leading or not layers:
        return alike
    dense = with_copies(run.leading, layer_of(run.leading))
    share = leading / layers
    saved = share * dense.saved + (1 - share) * alike.saved
    return Layer(saved, max(dense.working, alike.working))


def with_copies(run: Setup, layer: Layer) -> Layer:
    """Return the bytes of a layer with autocast's copies of its weights."""
    if not run.autocast:
        return layer
    copies = 2 * sum(count for count, _ in run.parts)
    if run.recompute == "full":
        return Layer(layer.saved, layer.working + copies)
    return Layer(layer.saved + copies, layer.working)


def at_work(run: Setup, stage: int, layer: Layer, logits: float) -> tuple[float, float, float]:
    """Return the bytes of activations beside those that are kept, of logits, and of the software's
    workspace, at the moment at which they are most.
    """
    is_last = stage == run.rank_of[-1]
    if not run.software.engine:
        has_copy = run.autocast and is_last
        copy = 2 * table_parameters(run) if has_copy else 0.0  # the head's
        return layer.working + copy, logits, 0.0
    has_leading = run.leading_layers(stage) > 0
    always = engine.placeholders(run, has_leading) + engine.workspaces(run)
    table = engine.of_table(run)
    of_layer = layer.working + engine.of_backward(run)
    moments = [(of_layer, 0.0, always)]
    if is_last:
        moments.append((engine.of_head(run), logits, always + table))
    if stage == 0:
        given_back = run.stages()[0] * layer.saved
        moments.append((entry_bytes(run) - given_back, 0.0, always + table))
    return max(moments, key=sum)

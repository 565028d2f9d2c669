"""What `train` says at its end: whether the numbers are right, what was sent, how fast it was."""

import math
from dataclasses import asdict
from statistics import fmean, median

from minidist.draw.table import format_sent
from minidist.full.checkpoint.cadence import advice
from minidist.full.mesh import CARRIED, SITES
from minidist.full.pipeline import NAMES, Plan, plan, simulate
from minidist.full.pipeline.schedules import CHUNKED
from minidist.full.recipe import Recipe
from minidist.full.trainer.loop import Outcome, Trainer
from minidist.full.trainer.verify import Verdict
from minidist.further.muon.muon_with_adamw import MuonWithAdamW
from minidist.further.nf4.options import in_four_bits
from minidist.plan import ModelStates, model_states
from minidist.plan.equation import MIXED_PRECISION_ADAM, adapted_states

LONG_BUBBLE = 0.15  # of a step: from there on it is worth another schedule


def summary(trainer: Trainer, outcome: Outcome, alike: bool, verdict: Verdict | None) -> str:
    """Return the table at the end."""
    history = outcome.history
    rows = (
        [("loss, first and last step", f"{history[0].loss:.4f} -> {history[-1].loss:.4f}")]
        if history
        else []
    )
    if verdict is not None:
        said = (
            f"{'yes' if verdict.same else 'NO'}: largest relative difference "
            f"{verdict.difference:.2e}"
        )
        rows += [
            ("same parameters as the serial run", said),
            ("    the criterion", verdict.criterion),
        ]
    rows.append(("same bits on every rank", "yes" if alike else "NO"))
    if outcome.scaler is not None:
        skipped = sum(not math.isfinite(metrics.gradient_norm) for metrics in history)
        rows.append(
            (
                "steps left out for an overflow",
                f"{skipped}; the loss scale is {outcome.scaler.scale:g}",
            )
        )
    rows += memory(trainer, outcome) + traffic(trainer, outcome)
    if history:
        seconds = [metrics.seconds for metrics in history]
        speed = fmean([metrics.tokens_per_second for metrics in history], seconds)
        waiting = fmean([metrics.communication for metrics in history], seconds)
        rows += [
            ("tokens per second", f"{speed:,.0f}"),
            ("time in messages and waiting", f"{waiting:.1%}"),
        ]
    rows += bubble(trainer, outcome) + checkpoints(trainer, outcome)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}   {value}" for name, value in rows)


def bubble(trainer: Trainer, outcome: Outcome) -> list[tuple[str, str]]:
    """Return how long the ranks of a pipeline were idle beside its plan, and what would help if
    that was too long.
    """
    measured = [metrics.bubble for metrics in outcome.history[1:] if metrics.bubble is not None]
    if not measured or trainer.checked.fit.plan is None:
        return []
    idle = median(measured)
    rows = [
        (
            "bubble of the pipeline",
            f"{idle:.1%}; by its plan, with equal stages, {trainer.planned_bubble:.1%}",
        )
    ]
    if idle > LONG_BUBBLE:
        parts = trainer.config.data.batch // trainer.mesh.layout.dp
        layers = trainer.model.config.layers
        found = remedies(trainer.checked.fit.plan, layers, parts, trainer.recipe)
        better = " or ".join(f"{how} ({share:.1%})" for how, share in found.items())
        better = better or "stages of equal work, or a larger --batch"
        rows.append((f"    WARNING: above {LONG_BUBBLE:.0%}", f"try {better}"))
    return rows


def remedies(now: Plan, layers: int, parts: int, recipe: Recipe) -> dict[str, float]:
    """Return options that shorten a plan's bubble and go with the recipe, each with the bubble it
    plans: microbatches, chunks, zero bubble.

    `parts` is how many microbatches a batch can be cut into at most.
    """
    ranks, m = now.ranks, now.microbatches
    if now.name not in NAMES:
        return {}
    chunks = now.stages // ranks if now.name in CHUNKED else 1
    tried = {
        f"--microbatches {k}": (now.name, k, chunks)
        for k in (2 * m, 4 * m, 8 * m)
        if parts % k == 0
    }
    if layers >= (chunks + 1) * ranks and m % ranks == 0:
        tried[f"--schedule interleaved --chunks {chunks + 1}"] = ("interleaved", m, chunks + 1)
    tried["--schedule zb-h1"] = ("zb-h1", m, 1)
    found = {
        how: simulate(plan(name, ranks, k, v)).bubble
        for how, (name, k, v) in tried.items()
        if recipe.goes_with(name)
    }
    return {how: share for how, share in found.items() if share < simulate(now).bubble - 1e-9}


def checkpoints(trainer: Trainer, outcome: Outcome) -> list[tuple[str, str]]:
    """Return what the checkpoints of this run cost, and with `--mtbf` how often to save."""
    if not outcome.saves:
        return []
    stalled, wrote = zip(*outcome.saves, strict=True)
    rows = [
        (
            "checkpoints",
            f"{len(wrote)}, training stood still {sum(stalled):.3g} s, written in "
            f"{sum(wrote):.3g} s",
        )
    ]
    if hours := trainer.config.run.mtbf:
        # As if training stood still until a checkpoint is on the disk: so much it costs at most, if
        # written beside it.
        step = median(metrics.seconds for metrics in outcome.history)
        rows.append(("    how often to save", advice(median(wrote), step, hours)))
    return rows


def memory(trainer: Trainer, outcome: Outcome) -> list[tuple[str, str]]:
    """Return what rank 0 held after the last step beside the formulas, if it had adapters or
    computed in 8 bits.
    """
    recipe, layout, sizes = trainer.recipe, trainer.mesh.layout, trainer.model.config
    if not (recipe.lora or recipe.fp8) or layout.tp * layout.pp > 1 or trainer.config.offload_to:
        return []
    bytes, ranks = trainer.dtype.itemsize, recipe.hsdp or trainer.mesh.data.size
    each = MIXED_PRECISION_ADAM if bytes == 2 else ModelStates(bytes, bytes, 2 * bytes)
    if recipe.lora:
        said = adapted_states(sizes, recipe.lora, in_four_bits(recipe), ranks, recipe.zero, each)
    else:
        said = model_states(sizes.parameter_count, ranks, recipe.zero, each)
    held = {
        name: f"{outcome.held[name]:,}, {formula:,.0f}" for name, formula in asdict(said).items()
    }
    return [
        (f"bytes of {name} held by rank 0, and by formula", both) for name, both in held.items()
    ]


def traffic(trainer: Trainer, outcome: Outcome) -> list[tuple[str, str]]:
    """Return what rank 0 sent along each axis, beside what a formula says where there is a plain
    one.
    """
    mesh, parallel, rows = trainer.mesh, trainer.config.parallel, []
    sent = {axis: format_sent(both, "{:,}".format) for axis, both in outcome.sent.items()}
    for axis, what in CARRIED.items():
        if getattr(mesh.layout, axis) > 1:
            rows.append((f"bytes of {what}", sent[axis]))
    if mesh.data.size > 1 and parallel.strategy == "ddp":
        what = "gradients and parameters" if parallel.zero else "gradients"
        both = outcome.sent["dp"] + outcome.sent.get("edp", 0)  # among copies of experts, too
        rows.append((f"bytes of {what} sent by rank 0", format_sent(both, "{:,}".format)))
        microbatches = trainer.recipe.microbatches
        label, formula = trainer.parallel.replica.volume(microbatches)
        rows.append((f"    {label} x steps", f"{formula * len(outcome.history):,.0f}"))
        if isinstance(optimizer := trainer.optimizer, MuonWithAdamW):
            formula = round(optimizer.volume() * len(outcome.history))
            rows.append(("bytes of Muon's updates sent by rank 0", f"{optimizer.matrices.sent:,}"))
            rows.append(("    by formula, in all steps", f"{formula:,}"))
        if apart := trainer.parallel.replica.between_nodes(microbatches):
            rows.append(("    of these to other nodes", sent["nodes"]))
            rows.append(("    the formula x steps", f"{apart[1] * len(outcome.history):,.0f}"))
    if mesh.dcn.size > 1:
        last = trainer.first_step + len(outcome.history)
        said = [each.volume(trainer.first_step, last) for each in trainer.parallel.companions]
        rows.append(("bytes sent to other sites by rank 0", sent[SITES]))
        rows.append(("    by formula, in all meetings", f"{sum(said):,.0f}"))
    return rows

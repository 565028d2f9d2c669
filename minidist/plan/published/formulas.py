"""Rows that were never measured: what a paper computed by a formula that `equation.py` has, too."""

from collections.abc import Iterator
from typing import Any

from minidist.full.data.files import at
from minidist.plan.device import ranges
from minidist.plan.equation import layer_activations, layer_input, model_states
from minidist.plan.memory import GB
from minidist.plan.published.fields import LeftOut, PublishedRow, positive

GIB = 2.0**30
POLICIES = {
    "seqpar_pct": ("none", True),
    "selective_pct": ("selective", False),
    "seqpar_selective_pct": ("selective", True),
    "full_pct": ("full", False),
}
"""What a column of Korthikanti et al. 2022, figure 7, recomputes, and whether sequences are cut."""


def formulas(row: PublishedRow) -> Iterator[tuple[str, float, float]]:
    """Yield what a paper computed by a formula that `equation.py` has too, beside our value."""
    config, measured = row.get("config") or {}, row["measured"]
    values = {}
    if "pos_gb" in measured:
        parameters = 1e9 * said(config, "params_b")
        ranks = said(config, "dp")
        for stage, name in enumerate(("pos_gb", "pos_g_gb", "pos_g_p_gb"), start=1):
            values[name] = model_states(parameters, ranks, stage).total / GB
    if "params_opt_gib" in measured:
        shares = said(config, "tp") * said(config, "pp")
        layers = said(config, "layers")
        hidden = said(config, "hidden")
        count = 12 * layers * hidden**2 / shares
        values["params_opt_gib"] = 18 * count / GIB
        recompute = said(config, "recompute")
        sp = said(config, "sequence_parallel")
        values["activations_gib"] = stored(config, recompute, sp) / GIB
    if "tp_baseline_pct" in measured:
        whole = stored(config, "none", False)
        for name, policy in POLICIES.items():
            values[name] = 100 * stored(config, *policy) / whole
    for name, value in values.items():
        if not positive(measured, name):
            raise LeftOut(f"it has no {name}")
        printed = measured[name]
        # What is printed is known to a unit of its last digit: nearer than that is equal.
        unit = 10.0 ** -len(str(printed).partition(".")[2])
        equal = abs(value - printed) < unit
        yield "formula", printed if equal else value, printed


def stored(config: PublishedRow, recompute: str, sp: bool) -> float:
    """Return the activations of the first stage, in bytes. (Korthikanti et al. 2022, equations 2 to
    6.)
    """
    sequence = said(config, "seq")
    batch = said(config, "micro_batch")
    hidden = said(config, "hidden")
    if recompute == "full":
        kept = layer_input(sequence, batch, hidden)
    else:
        heads = said(config, "heads")
        tp = said(config, "tp")
        scores = recompute == "none"
        kept = layer_activations(sequence, batch, hidden, heads, tp, sp, scores)
    pp = said(config, "pp")
    chunks = 1
    if config.get("virtual_pp"):
        chunks = said(config, "virtual_pp")
    more = 1.0
    if chunks > 1:
        more += (pp - 1) / (pp * chunks)
    layers = float(said(config, "layers"))
    return kept * layers * more


def said(config: PublishedRow, name: str) -> Any:
    """Return what a configuration says; raise FileError if it is nothing, or impossible."""
    kind, limit = ranges("config")[name]
    return at(config, name, kind=kind, limit=limit)

"""Rows that were never measured: what a paper computed by a formula that `equation.py` has, too."""

from collections.abc import Iterator

from minidist.full.data.files import at
from minidist.plan.equation import layer_activations, layer_input, model_states
from minidist.plan.memory import GB
from minidist.plan.published.fields import NUMBERS, READ, LeftOut, PublishedRow
from minidist.plan.published.rows import positive

GIB = 2.0**30
# what a column of Korthikanti et al. 2022, figure 7, recomputes, and whether sequences are cut
POLICIES = {
    "seqpar_pct": ("none", True),
    "selective_pct": ("selective", False),
    "seqpar_selective_pct": ("selective", True),
    "full_pct": ("full", False),
}


def formulas(row: PublishedRow) -> Iterator[tuple[str, float, float]]:
    """Yield what a paper computed by a formula that `equation.py` has too, beside our value."""
    config, measured = row.get("config") or {}, row["measured"]
    values = {}
    if "pos_gb" in measured:
        billions = at(config, "params_b", kind=float, limit=READ["params_b"][1])
        ranks = size(config, "dp")
        for stage, name in enumerate(("pos_gb", "pos_g_gb", "pos_g_p_gb"), start=1):
            values[name] = model_states(billions * 1e9, ranks, stage).total / GB
    if "params_opt_gib" in measured:
        layers, hidden = size(config, "layers"), size(config, "hidden")
        shares = size(config, "tp") * size(config, "pp")
        count = 12 * layers * hidden**2 / shares
        recompute = at(config, "recompute", kind=str)
        sp = at(config, "sequence_parallel", kind=bool)
        values["params_opt_gib"] = 18 * count / GIB
        values["activations_gib"] = stored(config, recompute, sp) / GIB
    if "tp_baseline_pct" in measured:
        whole = stored(config, "none", False)
        for name, policy in POLICIES.items():
            values[name] = 100 * stored(config, *policy) / whole
    for name, value in values.items():
        if not positive(measured, name):
            raise LeftOut(f"it has no {name}")
        printed = measured[name]
        # what is printed is known to a unit of its last digit: nearer than that is equal
        unit = 1.0
        if isinstance(printed, float):
            digits = str(printed).partition(".")[2]
            unit = 10.0 ** -len(digits)
        off = abs(value - printed)
        equal = off < unit
        yield "formula", printed if equal else value, printed


def stored(config: PublishedRow, recompute: str, sp: bool) -> float:
    """Return the activations of the first stage, in bytes. (Korthikanti et al. 2022, equations 2 to
    6.)
    """
    sizes = (
        size(config, "seq"),
        size(config, "micro_batch"),
        size(config, "hidden"),
    )
    heads = size(config, "heads")
    tp = size(config, "tp")
    if recompute == "full":
        kept = layer_input(*sizes)
    else:
        kept = layer_activations(*sizes, heads, tp, sp, attention_weights=recompute == "none")
    pp = size(config, "pp")
    chunks = 1
    if config.get("virtual_pp"):
        chunks = size(config, "virtual_pp")
    more = 1.0
    if chunks > 1:
        more += (pp - 1) / (pp * chunks)
    layers = size(config, "layers")
    return kept * float(layers) * more


def size(config: PublishedRow, name: str) -> int:
    """Return a whole number of a configuration; raise FileError if it says none."""
    return int(at(config, name, kind=int, limit=NUMBERS["size"][1]))

"""Lesson 14, task 5: the judge of layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from judges import bytes_along, groups_of

from minidist.course.grader.contract import Arrays, Case, Note, Wrong, known


def judge_chosen(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """All layouts that fit and no others, each with its seconds."""
    expected = all_that_fit(case.given[0])
    found = {
        tuple(map(int, row[:3])): float(row[3]) for row in results[0]["layouts"].reshape(-1, 4)
    }
    for layout in sorted(expected.keys() ^ found.keys()):
        (dp, pp, tp), (ranks, _) = layout, case.given[0]["ranks"].tolist()
        layers, _, _, heads, _, sequences = case.given[0]["model"].tolist()
        parts = {
            "pp": (pp, layers, "layers"),
            "tp": (tp, heads, "heads"),
            "dp": (dp, sequences, "sequences"),
        }
        bad = [
            f"{axis} = {part} does not divide {n} {name}"
            for axis, (part, n, name) in parts.items()
            if n % part
        ]
        bad += [f"these are {dp * pp * tp} ranks, not {ranks}"] * (dp * pp * tp != ranks)
        why = f"is not possible: {bad[0]}" if bad else "needs more than the memory"
        others = {
            clause: all_that_fit(case.given[0], how).keys() == found.keys()
            for how, clause in FITTING.items()
        }
        what = (
            f"is missing, but fits: with m = {sequences / dp:g}, min(pp, m) microbatches are "
            "under way"
        )
        says = f"the layout (dp, pp, tp) = {layout} {what if layout in expected else why}"
        raise Wrong(says + known(others, bool))
    for layout, seconds in expected.items():
        if not abs(found[layout] - seconds) <= 1e-6 * seconds:
            says = (
                f"a step of (dp, pp, tp) = {layout} takes {found[layout]:.6g} s, expected "
                f"{seconds:.6g} s"
            )
            wrongly = {
                clause: alike_in_all(found, all_that_fit(case.given[0], how))
                for how, clause in SLIPS.items()
            }
            raise Wrong(says + known(wrongly, bool))


def alike_in_all(found: Mapping[Any, float], other: Mapping[Any, float]) -> bool:
    """Tell whether all layouts take the same seconds."""
    return all(abs(found[layout] - seconds) <= 1e-6 * seconds for layout, seconds in other.items())


FITTING = {
    "below": "a layout that needs just as much memory as there is does not fit",
    "pp microbatches": "pp microbatches are under way also where there are fewer",
    "m microbatches": "all m microbatches are under way",
    "one microbatch": "one microbatch is under way",
    "most": "the larger of pp and m is under way, not the smaller",
    "states without tp": "parameters, gradients and states are not divided by tp",
    "states without pp": "parameters, gradients and states are not divided by pp",
    "states by all": "parameters, gradients and states are divided by dp, too",
    "states whole": "each GPU holds parameters, gradients and states of the whole model",
    "weights alone": "parameters have 2 bytes, and gradients and states are left out; all take 16",
    "activations without tp": "activations are not divided by tp",
    "activations of all layers": "a GPU holds activations of all layers, not of layers / pp",
    "no activations": "activations are left out",
    "everything fits": "memory is not asked",
    "any layers": "pp need not divide the layers",
    "any heads": "tp need not divide the heads",
    "any sequences": "dp need not divide the sequences",
    "fewer ranks": "fewer ranks than there are will do",
    "no bubble layouts": "layouts with more stages than microbatches are left out; they are possible",
    "tp in a node": "tp has to lie within a node; that is not asked here",
    "reversed": "keys are (tp, pp, dp), not (dp, pp, tp)",
}
SLIPS = {
    "rank 0": "the link is that of rank 0's group alone",
    "first stage": "the bytes are those of the first stage",
    "last stage": "the bytes are those of the last stage, or of the first",
    "all stages": "the bytes are those of all stages together",
    "stretches all": "the bubble stretches pp and dp as well",
    "stretches compute": "the bubble stretches compute alone; tp waits in it, too",
    "across": "all links are taken for those across nodes",
    "inside": "all links are taken for those inside a node",
    "by size": "an axis no longer than a node is taken to lie inside, whatever lies between its ranks",
    "no bubble": "there is no bubble",
    "pp of m": "the bubble is pp/m; it is (pp - 1)/m",
    "of the step": "the bubble is (pp - 1)/(m + pp - 1), its share of the whole step; it is (pp - 1)/m of the "
    "rest",
    "all sequences are microbatches": "m is the number of sequences: they are divided by dp first",
    "m is dp": "m is taken for dp",
    "2 N": "2 N operations a token count, the forward alone; with backward it is 6",
    "4 N": "4 N operations a token count, the backward alone; with forward it is 6",
    "8 N": "8 N operations a token count, with recomputing; it is 6",
    "one GPU": "one GPU computes everything: compute is not divided by the ranks",
    "one sequence": "compute is that of one sequence, not of the batch",
    "ranks less dp": "compute is not divided by dp",
    "ranks less pp": "compute is not divided by pp",
    "ranks less tp": "compute is not divided by tp",
    "no dp": "the seconds along dp are left out",
    "no pp": "the seconds along pp are left out",
    "no tp": "the seconds along tp are left out",
    "itemsize 4": "an element has 4 bytes, not 2",
    "itemsize 1": "an element has 1 byte, not 2",
    "tokens of a batch": "a microbatch has the tokens of all sequences; it has one sequence",
    "one microbatch sent": "the bytes are those of one microbatch, not of m",
    "slowest alone": "only the slowest axis counts; they add up",
}


def all_that_fit(given: Arrays, how: str = "") -> dict[tuple[int, int, int], float]:
    """Return the seconds of a step of every layout that fits; `how` is one of `SLIPS` or
    `FITTING`.
    """
    layers, hidden, intermediate, heads, sequence, sequences = given["model"].tolist()
    (inside, across, memory, flops), (ranks, per_node) = (
        given["machine"].tolist(),
        given["ranks"].tolist(),
    )
    matrices, found = layers * (4 * hidden**2 + 3 * hidden * intermediate), {}
    compute = (
        {"2 N": 2, "4 N": 4, "8 N": 8}.get(how, 6)
        * matrices
        * sequence
        * sequences
        / (ranks * flops)
    )
    compute *= {"one GPU": ranks, "one sequence": 1 / sequences}.get(how, 1)
    for dp, pp, tp in product(range(1, ranks + 1), repeat=3):
        if ranks % (dp * pp * tp) if how == "fewer ranks" else dp * pp * tp != ranks:
            continue
        bad = {"any layers": layers % pp, "any heads": heads % tp, "any sequences": sequences % dp}
        if any(each for rule, each in bad.items() if rule != how) or sequences < dp:
            continue
        if (how == "no bubble layouts" and pp > sequences // dp) or (
            how == "tp in a node" and tp > per_node
        ):
            continue
        m = sequences // dp
        if not fitting(how, matrices, layers, sequence * hidden, (dp, pp, tp, m), memory):
            continue
        m = {"all sequences are microbatches": sequences, "m is dp": dp}.get(how, m)
        stages = {"first stage": [0], "last stage": [pp - 1], "all stages": range(pp)}
        stages["stage"] = [1 if pp > 2 else 0]
        model = (layers, hidden, intermediate, sequence * (sequences if how == "tokens of a batch" else 1),
                 1 if how == "one microbatch sent" else m, {"itemsize 4": 4, "itemsize 1": 1}.get(how, 2))  # fmt: skip
        sent = [bytes_along(dp, pp, tp, stage, model) for stage in stages.get(how, stages["stage"])]
        seconds = {axis: sum(each[axis] for each in sent) for axis in ("dp", "pp", "tp")}
        for axis, groups in groups_of([dp, pp, tp]).items():
            several = groups[:1] if how == "rank 0" else groups
            near = all(group[0] // per_node == group[-1] // per_node for group in several)
            near = len(groups[0]) <= per_node if how == "by size" else near
            near = how == "inside" or (near and how != "across")
            seconds[axis] *= 0 if how == f"no {axis}" else 1
            seconds[axis] /= inside if near else across
        stretch = {
            "no bubble": 1.0,
            "pp of m": (m + pp) / m,
            "of the step": 1 + (pp - 1) / (m + pp - 1),
        }.get(how, (m + pp - 1) / m)
        busy = compute * {"ranks less dp": dp, "ranks less pp": pp, "ranks less tp": tp}.get(how, 1)
        rest = (seconds["pp"] + seconds["dp"]) * (stretch if how == "stretches all" else 1.0)
        whole = (busy + seconds["tp"]) * stretch + rest
        whole = busy * stretch + seconds["tp"] + rest if how == "stretches compute" else whole
        whole = busy * stretch + max(seconds.values()) if how == "slowest alone" else whole
        found[(tp, pp, dp) if how == "reversed" else (dp, pp, tp)] = whole
    return found


def fitting(
    how: str,
    matrices: int,
    layers: int,
    activation: int,
    layout: tuple[int, int, int, int],
    memory: float,
) -> bool:
    """Tell whether a layout fits; `how` is one of `FITTING`."""
    dp, pp, tp, m = layout
    under_way = {
        "pp microbatches": pp,
        "m microbatches": m,
        "one microbatch": 1,
        "most": max(pp, m),
    }
    parts = {
        "states without tp": pp,
        "states without pp": tp,
        "states by all": dp * pp * tp,
        "states whole": 1,
    }
    held = (2 if how == "weights alone" else 16) * matrices / parts.get(how, pp * tp)
    kept = under_way.get(how, min(pp, m)) * (
        layers / (1 if how == "activations of all layers" else pp)
    )
    kept *= 34 * activation / (1 if how == "activations without tp" else tp)
    held += 0 if how == "no activations" else kept
    return how == "everything fits" or (held < memory if how == "below" else held <= memory)

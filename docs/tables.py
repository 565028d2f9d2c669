"""Write the tables of this folder that follow from the package: `python docs/tables.py`. A test
compares them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from minidist.cli.plan.as_published import gpus_of, holding
from minidist.full.options import flags_of
from minidist.further import Recipe
from minidist.plan.device import Device, machine, table
from minidist.plan.memory import GB, bytes_held
from minidist.plan.model import model
from minidist.plan.run import Setup
from minidist.plan.search import RESERVE, search
from minidist.plan.sites.ways import WAYS, Wire, join
from minidist.plan.trust.kinds import Range, errors
from minidist.plan.trust.runs import newest, stored


def combinations() -> str:
    """Return which stages of ZeRO, axes, adapters and numbers of 8 bits go with which
    schedule.
    """
    columns = {0: "ZeRO 0", 1: "ZeRO 1", 2: "ZeRO 2", 3: "ZeRO 3"}
    columns |= {
        "cp": "context",
        "ep": "experts",
        "lora": "LoRA",
        "fp8": "fp8",
    }
    rows = [f"| schedule | {' | '.join(columns.values())} |", f"|---|{'---|' * len(columns)}"]
    for schedule, offered in Recipe.supported.items():
        rows.append(
            f"| {schedule} "
            f"|{'|'.join(' yes ' if column in offered else ' ' for column in columns)}|"
        )
    return "\n".join(rows)


def options() -> str:
    """Return the options of each strategy as the package declares them, without what no command
    line can say.
    """
    rows = ["| option | default | | declared in `minidist/` |", "|---|---|---|---|"]
    for option in sorted(flags_of(Recipe), key=lambda option: home(option.name)):
        said = option.metadata["help"]
        default = option.default if option.default is not False else "no"
        rows.append(f"| `{option.name}` | {default} | {said} | `{home(option.name)}` |")
    return "\n".join(rows)


def home(name: str) -> str:
    """Return the file that declares an option of a recipe."""
    declaring = next(
        base for base in Recipe.__mro__ if name in vars(base).get("__annotations__", {})
    )
    return declaring.__module__.removeprefix("minidist.").replace(".", "/") + ".py"


# ---------------------------------------------------------------- published models at usual layouts


ROOM = Device.named("a100-80").memory
# Models at layouts that people use on such GPUs, and a few that do not fit: name, tokens of a
# sequence, layout.
USUAL: list[tuple[str, int, dict[str, Any]]] = [
    ("llama-7b", 4096, {"dp": 8, "zero": 0}),
    ("llama-7b", 4096, {"dp": 8}),
    ("llama-13b", 4096, {"dp": 8}),
    ("llama-13b", 4096, {"dp": 8, "zero": 3}),
    ("llama-70b", 4096, {"dp": 64, "zero": 3}),
    ("llama-70b", 4096, {"dp": 64, "zero": 3, "recompute": "full"}),
    ("llama-70b", 4096, {"tp": 8, "pp": 4, "dp": 4}),
    ("gpt3-175b", 2048, {"tp": 8, "pp": 8, "dp": 16}),
    ("llama-405b", 8192, {"tp": 8, "pp": 16, "dp": 64}),
    ("llama-405b", 8192, {"tp": 8, "pp": 16, "dp": 64, "recompute": "full"}),
    ("palm-540b", 2048, {"tp": 8, "pp": 16, "dp": 16}),
]


def setup(name: str, sequence: int, layout: dict[str, Any]) -> Setup:
    """Return the run: one sequence a microbatch, sequence parallelism with tp, ZeRO 1 unless said
    otherwise.

    Only a pipeline has several microbatches.
    """
    axes = {axis: layout.get(axis, 1) for axis in ("tp", "pp", "dp")}
    gpus = machine(f"a100:{axes['tp'] * axes['pp'] * axes['dp']}")
    batch = axes["dp"] * (4 * axes["pp"] if axes["pp"] > 1 else 1)
    return Setup(
        model(name),
        gpus,
        sequence,
        batch,
        **{"zero": 1, **layout},
        sp=axes["tp"] > 1,
        fused_loss=True,
    )


def markdown_table(
    rows: Sequence[tuple[str, int, dict[str, Any]]] = USUAL, capacity: float = ROOM
) -> str:
    """Return what a GPU holds as a table, in GB; by default of the usual layouts."""
    kinds = (
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "communication",
        "workspace",
        "resident",
    )
    lines = [
        f"| model | GPUs | layout | recompute | {' | '.join(kinds)} | total | fits "
        f"{capacity / GB:.0f} GB |"
    ]
    lines.append("|---" * (len(kinds) + 6) + "|")
    for name, sequence, layout in rows:
        run = setup(name, sequence, layout)
        bytes = bytes_held(run)
        axes = " ".join(f"{axis}={layout[axis]}" for axis in ("tp", "pp", "dp") if axis in layout)
        total = sum(bytes.values())
        parts = " | ".join(f"{bytes[kind] / GB:.1f}" for kind in kinds)
        lines.append(
            f"| {name} | {run.machine.gpus} | {axes} zero={run.zero} | {run.recompute} | {parts} "
            f"| {total / GB:.1f} | {'yes' if total <= capacity else '**no**'} |"
        )
    return "\n".join(lines)


def losses() -> str:
    """Return what ways that change the numbers made of the loss, as a run wrote it to
    `losses.jsonl`.
    """
    file = Path(__file__).with_name("losses.jsonl")
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    usual = fmean(found[0]["losses"])
    rows = ["| way | held-out loss | spread | beside DDP | a rank sends |", "|---" * 5 + "|"]
    for row in found:
        mean = fmean(row["losses"])
        spread = max(row["losses"]) - min(row["losses"])
        rows.append(
            f"| {row['name']} | {mean:.2f} | {spread:.2f} | {mean - usual:+.2f} "
            f"| {row['sent'] / 1e6:,.1f} MB |"
        )
    return "\n".join(rows)


def sites() -> str:
    """Return what each way to join two sites makes of a wire of 1 Gbit/s, as the command of the page
    does.
    """
    where = machine("h100:64")
    run = Setup(model("llama-7b"), where, 4096, 256, software=newest(where), fused_loss=True)
    found = search(run, {"zero": 0, "dp": 32}, RESERVE).groups()[0][0]
    rows = [
        "| way | `train` | a meeting sends | step | as good as free from |",
        "|---" * 5 + "|",
    ]
    for name, each in join(found, Wire(2, 125e6)).items():
        flags = WAYS[name].flags.format(sites=2)
        rows.append(
            f"| {name} | `{flags}` | {each.bytes / GB:,.3g} GB | {each.seconds:,.2f} s "
            f"| {8 * each.enough / GB:,.3g} Gbit/s |"
        )
    return "\n".join(rows)


def trust() -> str:
    """Return how far off rows of each kind were, as `tests/plan/published/proof.py` wrote it."""
    rows = [
        "| kind | runs timed | sources | error of seconds | bias | took, as a multiple of the plan "
        "| runs weighed | error of bytes | held, as a multiple of the plan |",
        "|---" * 9 + "|",
    ]
    for kind, quantities in errors()["kinds"].items():
        cells = [kind]
        for quantity in ("time", "memory"):
            if quantity not in quantities:
                cells += ["none", *[""] * (4 if quantity == "time" else 2)]
                continue
            each = Range(**quantities[quantity])
            around = f"{each.low:.2f} to {each.high:.2f}" if each.low else "too few rows"
            cells.append(str(each.rows))
            if quantity == "time":
                cells += [str(each.sources), f"{each.mean} %", f"{each.bias:+} %", around]
            else:
                cells += [f"{each.mean} %", around]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, "", how_to_read(*next(iter(errors()["kinds"].items())))])


def how_to_read(kind: str, quantities: dict[str, Any]) -> str:
    """Return what the first row of the table of errors says, in sentences."""
    time, memory = (Range(**quantities[quantity]) for quantity in ("time", "memory"))
    return (
        f"The first row in words: there are {time.rows} published runs of the kind *{kind}*, from "
        f"{time.sources} sources. Their planned seconds were off by {time.mean} % on average. With "
        f"their signs the errors mostly cancel; what is left, the bias, says that these plans were "
        f"{abs(time.bias)} % too {'short' if time.bias < 0 else 'long'}. Four runs in five took "
        f"between {time.low:.2f} and {time.high:.2f} times the seconds that were planned for them; one "
        f"in ten took less, and one in ten more. Of {memory.rows} runs it is known what a GPU held: "
        f"{memory.low:.2f} to {memory.high:.2f} times the plan, again in four of five."
    )


def ranked() -> str:
    """Return how rows were predicted, and how well layouts of one model were ranked."""
    found, rows = errors()["ranking"], errors()["rows"]
    good = found["chosen well"] / found["models"]
    return (
        f"{rows:,} rows were predicted with constants {errors()['constants']}. "
        f"Of {found['models']} models with several published layouts, the one predicted best took "
        f"{found['mean']} times the best on average, and at most 1.05 times in {good:.0%}."
    )


def published() -> str:
    """Return named runs as published, as planned, and as they would be run today."""
    rows = [
        "| run | GPUs | as published | software | GPU hours published | planned "
        "| planned / published | today's best layout | planned | planned / published |",
        "|---" * 10 + "|",
    ]
    for name, each in stored().items():
        said = table("runs")[name]
        cells = [each["says"], gpus_of(name), each.get("layout", "not planned")]
        cells[2] += " (searched)" * bool(said.get("searched"))
        cells += [said["software"], f"{each['published']:,}" if "published" in each else ""]
        for of, layout in (("planned", ""), ("today", "layout today")):
            cells += [each.get(layout, "not planned")] if layout else []
            share = f"{each[of] / each['published']:.2f}" if of in each else ""
            cells += [f"{each[of]:,}" if of in each else "", share]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def facts() -> str:
    """Return where the facts of named runs are from, and what was not published."""
    lines = []
    for name, each in stored().items():
        said = table("runs")[name]
        words = [f"{said['says']}: {said['source']}", f"Unsaid: {said['unsaid']}"]
        if "holds" in each:
            words.append(f"Predicted: {holding(name, each['holds'])}")
        if "refused" in each:
            words.append(f"Not planned: {each['refused']}")
        lines.append(f"- {'. '.join(words)}.")
    return "\n".join(lines)


TABLES = {
    "combinations": combinations,
    "options": options,
    "fit": markdown_table,
    "losses": losses,
    "sites": sites,
    "trust": trust,
    "ranked": ranked,
    "published": published,
    "facts": facts,
}


def with_tables(text: str) -> str:
    """Return a page with its tables written anew, each between `<!-- name -->` and `<!-- end
    -->`.
    """

    def table(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n(?:.*?\n)??<!-- end -->", table, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in Path(__file__).parent.glob("*.md"):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")

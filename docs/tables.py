"""Write the tables of this folder that follow from the package: `python docs/tables.py`. A test compares them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minidist.parallel import Recipe
from minidist.plan.estimate import GB, Estimate, Recompute, estimate


def combinations() -> str:
    """Return which stages of ZeRO, axes, adapters and numbers of few bits go with which schedule."""
    columns = {0: "ZeRO 0", 1: "ZeRO 1", 2: "ZeRO 2", 3: "ZeRO 3"}
    columns |= {"cp": "context", "ep": "experts", "lora": "LoRA", "qlora": "QLoRA", "fp8": "fp8", "zeropp": "ZeRO++"}
    rows = [f"| schedule | {' | '.join(columns.values())} |", f"|---|{'---|' * len(columns)}"]
    for schedule, offered in Recipe.supported.items():
        rows.append(f"| {schedule} |{'|'.join(' yes ' if column in offered else ' ' for column in columns)}|")
    return "\n".join(rows)


# ---------------------------------------------------------------- published models at usual layouts


@dataclass(frozen=True)
class Model:
    """Sizes of a published model. Of key-value heads and MLP only the number of parameters tells."""

    name: str
    parameters: float
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    vocabulary: int
    sequence: int
    tied: bool
    source: str


@dataclass(frozen=True)
class Usual:
    """A model at a layout, for one microbatch of one sequence."""

    model: Model
    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 1
    recompute: Recompute = "none"

    def estimate(self) -> Estimate:
        """Estimate it; with tensor parallelism also sequence parallelism, as usual."""
        model = self.model
        return estimate(
            model.parameters, model.layers, model.hidden, 1, model.sequence, model.heads, model.vocabulary,
            tp=self.tp, pp=self.pp, dp=self.dp, zero=self.zero, recompute=self.recompute,
            sequence_parallel=self.tp > 1, tied=model.tied,
        )  # fmt: skip


LLAMA_2 = "Touvron et al. 2023, Llama 2"
LLAMA_2_7B = Model("Llama-2 7B", 6.738e9, 32, 4096, 32, 32, 32_000, 4096, False, LLAMA_2)
LLAMA_2_13B = Model("Llama-2 13B", 13.016e9, 40, 5120, 40, 40, 32_000, 4096, False, LLAMA_2)
LLAMA_2_70B = Model("Llama-2 70B", 68.977e9, 80, 8192, 64, 8, 32_000, 4096, False, LLAMA_2)
GPT_3 = Model("GPT-3 175B", 174.6e9, 96, 12_288, 96, 96, 50_257, 2048, True, "Brown et al. 2020, table 2.1")
LLAMA_3 = Model(
    "Llama-3.1 405B", 405.9e9, 126, 16_384, 128, 8, 128_256, 8192, False, "Grattafiori et al. 2024, table 3"
)
PALM = Model("PaLM 540B", 540.35e9, 118, 18_432, 48, 1, 256_000, 2048, True, "Chowdhery et al. 2022, table 1")


def usual_layouts() -> list[Usual]:
    """Return published models at layouts that people use on GPUs of 80 GB, and a few that do not fit."""
    return [
        Usual(LLAMA_2_7B, dp=8, zero=0),
        Usual(LLAMA_2_7B, dp=8),
        Usual(LLAMA_2_13B, dp=8),
        Usual(LLAMA_2_13B, dp=8, zero=3),
        Usual(LLAMA_2_70B, dp=64, zero=3),
        Usual(LLAMA_2_70B, dp=64, zero=3, recompute="full"),
        Usual(LLAMA_2_70B, tp=8, pp=4, dp=4),
        Usual(GPT_3, tp=8, pp=8, dp=16),
        Usual(LLAMA_3, tp=8, pp=16, dp=64),
        Usual(LLAMA_3, tp=8, pp=16, dp=64, recompute="full"),
        Usual(PALM, tp=8, pp=16, dp=16),
    ]


def markdown_table(rows: Sequence[Usual] | None = None, capacity: float = 80 * GB) -> str:
    """Return the estimates as a table, in GB a GPU; by default of the usual layouts."""
    lines = [
        "| model | GPUs | layout | recompute | parameters | gradients | optimizer | activations | communication "
        f"| total | fits {capacity / GB:.0f} GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in usual_layouts() if rows is None else rows:
        held = row.estimate()
        axes = [f"{axis}={ranks}" for axis, ranks in (("tp", row.tp), ("pp", row.pp), ("dp", row.dp)) if ranks > 1]
        parts = (held.parameters, held.gradients, held.optimizer, held.activations, held.communication, held.total)
        lines.append(
            f"| {row.model.name} | {row.tp * row.pp * row.dp} | {' '.join(axes)} zero={row.zero} | {row.recompute} | "
            f"{' | '.join(f'{part / GB:.1f}' for part in parts)} | {'yes' if held.total <= capacity else '**no**'} |"
        )
    return "\n".join(lines)


TABLES = {"combinations": combinations, "fit": markdown_table}


def with_tables(text: str) -> str:
    """Return a page with its tables written anew, each between `<!-- name -->` and `<!-- end -->`."""

    def table(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n(?:.*?\n)??<!-- end -->", table, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in Path(__file__).parent.glob("*.md"):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")

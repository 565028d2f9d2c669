"""Write the tables of this folder that follow from the package: `python docs/tables.py`. A test compares them."""

from __future__ import annotations

import re
from pathlib import Path

from minidist.memory.account.estimate import markdown_table
from minidist.parallel import Recipe


def combinations() -> str:
    """Return which stages of ZeRO go with which schedule."""
    rows = ["| schedule | ZeRO 0 | ZeRO 1 | ZeRO 2 | ZeRO 3 |", "|---|---|---|---|---|"]
    for schedule, stages in Recipe.supported.items():
        rows.append(f"| {schedule} |{'|'.join(' yes ' if zero in stages else ' ' for zero in range(4))}|")
    return "\n".join(rows)


TABLES = {"combinations": combinations, "fit": markdown_table}


def with_tables(text: str) -> str:
    """Return a page with its tables written anew, each between `<!-- name -->` and `<!-- end -->`."""

    def table(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n(?:.*?\n)??<!-- end -->", table, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in Path(__file__).parent.glob("*.md"):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")

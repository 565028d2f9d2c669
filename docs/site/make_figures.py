"""Run the package again for the interactive figures: `python docs/site/make_figures.py [NAME ...]`.

Writes `docs/site/figures/data/NAME.json`, each with the command and the commit that made it. Data
that come out as they were stay as they are, commit and all.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = HERE / "figures/data"
NAMES = ("pipelines", "zero", "collectives", "context", "experts", "planner")


def made(name: str) -> dict[str, Any]:
    """Run the package for one figure; return its data."""
    data: dict[str, Any] = importlib.import_module(f"figures.{name}").FIGURE.as_json()
    return data


def main(names: list[str]) -> int:
    """Write the figures' data; return the exit status."""
    if unknown := set(names) - set(NAMES):
        print(f"there is no figure {', '.join(unknown)}: there are {', '.join(NAMES)}")
        return 2
    shown = subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"], cwd=HERE, capture_output=True, text=True
    )
    for name in names or NAMES:
        file, data = DATA / f"{name}.json", made(name)
        old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        command = f"python docs/site/make_figures.py {name}"
        data |= {"command": command, "commit": shown.stdout.strip()}
        if {**old, "commit": ""} != {**data, "commit": ""}:
            text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
            file.write_text(text + "\n", encoding="utf-8")
        print(f"{file.name}: {file.stat().st_size:,} bytes, {len(data['states'])} states")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

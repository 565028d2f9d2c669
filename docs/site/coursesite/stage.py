"""Put every page of the site in its place, as a file that Sphinx reads.

    README.md                            readme.md
    docs/memory.md                       docs/memory.md
    lessons/05_zero/README.md            lessons/05_zero/index.md
    notebooks/05_zero.ipynb              notebooks/05_zero.ipynb
    minidist/full/collectives/                reference/collectives.folder
    docs/site/pages/weekend.md           weekend.md

Only links change, and what `lessons.py` adds. A file that is as it was is not written again, so
Sphinx reads only what has changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coursesite.lessons import lesson, lesson_folders, toctree
from coursesite.links import reference_page, rewritten
from coursesite.paths import with_paths

OWN = "docs/site/pages/"  # pages that are written for the site
# By these tags myst-nb folds a part of a cell which a notebook folds.
FOLDED = {"outputs_hidden": "hide-output", "source_hidden": "hide-input"}


def pages_of(repository: Path) -> dict[str, str]:
    """Return which file of the site is made of which file of the repository, both as paths from
    their roots.
    """
    staged = {
        f"{name}.md": f"{name.lower()}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")
    }
    for folder in ("docs", "lessons"):
        for path in sorted((repository / folder).glob("*.md")):
            staged[f"{folder}/{path.name}"] = f"{folder}/{index_or(path.name)}"
    for folder in lesson_folders(repository):
        staged[f"lessons/{folder}/README.md"] = f"lessons/{folder}/index.md"
    for path in sorted((repository / "notebooks").glob("*.ipynb")):
        staged[f"notebooks/{path.name}"] = f"notebooks/{path.name}"
    own = repository / OWN
    for path in sorted(own.rglob("*.md")):
        staged[path.relative_to(repository).as_posix()] = path.relative_to(own).as_posix()
    return staged


def index_or(name: str) -> str:
    """Return the name of a page: that of a README is the index of its folder."""
    return "index.md" if name == "README.md" else name


def package_folders(repository: Path) -> list[str]:
    """Return the folders of the package that have code, from the root of the repository."""
    files = (repository / "minidist").rglob("*.py")
    return sorted({path.parent.relative_to(repository).as_posix() for path in files})


def stage(repository: Path, target: Path) -> None:
    """Write all pages into `target`; remove those that are no longer made."""
    written = set()
    for name, content in staged_files(repository):
        path = target / name
        written.add(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)
    for path in target.rglob("*"):
        if path.is_file() and path not in written:
            path.unlink()


def staged_files(repository: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield the name and the content of each file that Sphinx is to read."""
    staged = pages_of(repository)
    for source, name in staged.items():
        text = (repository / source).read_text(encoding="utf-8")
        if name.endswith(".ipynb"):
            yield name, notebook(text, source, staged, repository)
        else:
            if not source.startswith(OWN):  # whose links are those of the site
                text = rewritten(text, source, staged, repository)
            yield from dressed(name, with_paths(text, repository), repository)
    for folder in package_folders(repository):
        yield f"{reference_page(folder)}.folder", folder + "\n"


def dressed(name: str, text: str, repository: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield a page with what belongs to it beside its text, and the files that this needs."""
    folder = Path(name).parent.name
    if name == "lessons/index.md":
        pages = [f"{each}/index" for each in lesson_folders(repository)]
        yield name, text + toctree(*pages, "../notebooks/your_program", "NCCL")
    elif name == "docs/index.md":
        yield name, text + toctree(*named_pages(text))
    elif folder in lesson_folders(repository):
        yield from lesson(folder, text, repository)
    else:
        yield name, text


def named_pages(text: str) -> list[str]:
    """Return the pages beside this one that a text links to, in its order."""
    return list(dict.fromkeys(re.findall(r"\]\(([\w-]+)\.md\)", text)))


def notebook(text: str, source: str, staged: dict[str, str], repository: Path) -> str:
    """Return a notebook with the links of the site. What a notebook folds is folded there, too."""
    read: dict[str, Any] = json.loads(text)
    read["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    for cell in read["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = rewritten("".join(cell["source"]), source, staged, repository)
        tags = [FOLDED[name] for name in cell["metadata"].get("jupyter", {})]
        cell["metadata"].setdefault("tags", []).extend(tags)
    return json.dumps(read, ensure_ascii=False)

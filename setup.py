"""What pyproject.toml cannot say: the course travels in the wheel, and the README that a package
index shows.

The wheel has what a student is handed, and the solutions. An index has no files for the README's
links to lead to, so there each is the name of its file.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TAKEN = {
    "lessons": (
        "*.md",
        "*.sbatch",
        *(
            f"*/{name}"
            for name in (
                "README.md",
                "exercise.py",
                "judges*.py",
                "solution.py",
                "checks.py",
                "cluster.py",
            )
        ),
    ),
    "notebooks": ("*.ipynb",),
}


class BuildWithCourse(build_py):
    """Copy `lessons` and `notebooks` into the package that is built. A checkout has them beside
    it.
    """

    def run(self) -> None:
        super().run()
        for folder, patterns in TAKEN.items() if not self.editable_mode else ():
            for path in (path for pattern in patterns for path in Path(folder).glob(pattern)):
                target = Path(self.build_lib, "minidist", path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


def without_links(text: str) -> str:
    """Return Markdown in which `[a page](docs/page.md)` is `a page (docs/page.md)`. Links to the
    web stay.
    """

    def name(link: re.Match[str]) -> str:
        words, file = link[1], link[2].partition("#")[0]
        return f"`{file}`" if file.startswith(words.strip("`")) else f"{words} (`{file}`)"

    return re.sub(r"\[([^]]+)\]\((?!https?:)([^)]+)\)", name, text)


if __name__ == "__main__":
    setup(
        cmdclass={"build_py": BuildWithCourse},
        long_description=without_links(Path("README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )

"""The course travels in the wheel: what a student is handed, and the solutions; the rest is in pyproject.toml."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TAKEN = {
    "lessons": (
        "*.md",
        "*.sbatch",
        *(f"*/{name}" for name in ("README.md", "exercise.py", "judges*.py", "solution.py", "checks.py", "cluster.py")),
    ),
    "notebooks": ("*.ipynb",),
}


class BuildWithCourse(build_py):
    """Copy `lessons` and `notebooks` into the package that is built. A checkout has them beside it."""

    def run(self) -> None:
        super().run()
        for folder, patterns in TAKEN.items() if not self.editable_mode else ():
            for path in (path for pattern in patterns for path in Path(folder).glob(pattern)):
                target = Path(self.build_lib, "minidist", path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


setup(cmdclass={"build_py": BuildWithCourse})

"""The pages in `book/`, which are to become the package's, pass their own tests without the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BOOK = Path(__file__).parents[1] / "book"
FILES = sorted(file.name for file in (BOOK / "tests").glob("test_*.py"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", FILES)
def test_the_book_alone(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    # Otherwise torch looks for the package that is installed, which is not the book.
    environment = {**os.environ, "PYTHONPATH": str(BOOK), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [*command, "--rootdir", ".", f"tests/{file}"],
        cwd=BOOK,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]

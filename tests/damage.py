"""Ways in which a disk may damage a file."""

from __future__ import annotations

from pathlib import Path


def cut(path: Path) -> None:
    """Lose the last byte."""
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    """Lose everything but the name."""
    path.write_bytes(b"")

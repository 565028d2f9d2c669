"""A few texts that all members of a job can read: what they agree by.

On simulated ranks it is a dictionary; processes use torch's TCPStore, in the launcher. A cut wire
does not cut members from the store, nor a cut store members from each other: who cannot reach it
decides nothing, and ends.
"""

import threading
from collections import defaultdict
from typing import Protocol


class Store(Protocol):
    """Texts by name."""

    def read(self, name: str) -> str:
        """Return the text; nothing if there is none."""

    def append(self, name: str, text: str) -> None:
        """Add to the end of a text."""

    def claim(self, name: str, text: str) -> str:
        """Write a text unless there is one; return the one that stands there. Of several writers
        the first wins.
        """

    def wait(self) -> None:
        """Return after a moment, in which something may have changed."""


class MemoryStore:
    """Texts in this process."""

    def __init__(self) -> None:
        self.texts: defaultdict[str, str] = defaultdict(str)
        self.changed = threading.Condition()

    def read(self, name: str) -> str:
        """Return the text."""
        with self.changed:
            return self.texts.get(name, "")

    def append(self, name: str, text: str) -> None:
        """Add to its end."""
        with self.changed:
            self.texts[name] += text
            self.changed.notify_all()

    def claim(self, name: str, text: str) -> str:
        """Write it unless there is one."""
        with self.changed:
            found = self.texts[name] = self.texts[name] or text
            self.changed.notify_all()
            return found

    def wait(self) -> None:
        """Return at the next change, or after a moment."""
        with self.changed:
            self.changed.wait(0.05)

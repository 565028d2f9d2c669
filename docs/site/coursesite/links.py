"""Where the links of a Markdown file lead on the site.

    [a lesson](../02_ring_all_reduce/README.md)    the page that is made of this file
    [a file](minidist/full/apply.py)           the page of its source lines
    [a folder](minidist/plan/published/)           its page of the reference

A page of Sphinx is named by its Markdown file, so such links stay links between files. All else is
named from the root of the site, as `root:source/minidist/full/apply.py.html`; `extension.py`
makes a relative address of it, since only then it is known where the page stands.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = "root:"
LINK = re.compile(r"(?<!!)\]\((?!https?:|mailto:|#|root:)([^)#\s]+)(#[^)\s]*)?\)")
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.M | re.S)


class LinkError(ValueError):
    """A link leads nowhere."""


def source_page(file: str) -> str:
    """Return the page of a file's source lines, from the root of the site."""
    return f"source/{file}.html"


def reference_page(folder: str) -> str:
    """Return the page of the reference about a folder of the package, without its suffix."""
    inside = folder.strip("/").removeprefix("minidist").strip("/")
    return f"reference/{inside.replace('/', '.') or 'minidist'}"


def rewritten(text: str, page: str, staged: Mapping[str, str], repository: Path) -> str:
    """Return the text of a page with its links as they have to be on the site.

    Parameters
    ----------
    text : str
        Markdown. Links inside code are left alone.
    page : str
        The file, from the root of the repository.
    staged : mapping
        Which file of the site is made of which file of the repository.

    Raises
    ------
    LinkError
        If a link leads to nothing that is in the repository.
    """
    here = posixpath.dirname(staged[page])

    def target(found: re.Match[str]) -> str:
        there = posixpath.normpath(posixpath.join(posixpath.dirname(page), found[1]))
        fragment = found[2] or ""
        if f"{there}/README.md" in staged:
            there = f"{there}/README.md"
        if there in staged:
            return f"]({posixpath.relpath(staged[there], here)}{fragment})"
        inside = there.removesuffix("/__init__.py")
        if inside.split("/")[0] == "minidist" and (repository / inside).is_dir():
            return f"]({ROOT}{reference_page(inside)}.html{fragment})"
        if (repository / there).is_file():
            return f"]({ROOT}{source_page(there)}{fragment})"
        raise LinkError(f"{page} links to {found[1]}, which is not there")

    pieces = []
    for piece, is_code in around_code(text):
        pieces.append(piece if is_code else LINK.sub(target, piece))
    return "".join(pieces)


def around_code(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a Markdown text, and whether each is code."""
    end = 0
    for code in CODE.finditer(text):
        yield text[end : code.start()], False
        yield code[0], True
        end = code.end()
    yield text[end:], False


def linked_files(text: str) -> set[str]:
    """Return the source files to whose pages a rewritten text links."""
    return set(re.findall(rf"\]\({ROOT}source/([^)#]+)\.html", text))

"""What Sphinx is told: parsers, directives, and what happens to each page.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

from coursesite.links import ROOT
from coursesite.reference import FolderParser


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register everything."""
    app.add_source_suffix(".folder", "folder")
    app.add_source_parser(FolderParser)
    app.connect("doctree-resolved", resolve_root)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def resolve_root(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Make relative addresses of those that are named from the root of the site."""
    up = "../" * docname.count("/")
    for reference in doctree.findall(nodes.reference):
        address = reference.get("refuri", "")
        if address.startswith(ROOT):
            reference["refuri"] = up + address.removeprefix(ROOT)
            reference["internal"] = True

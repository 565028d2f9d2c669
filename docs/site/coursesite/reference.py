"""The reference: a page for each folder of the package, a section for each of its files.

A page is made of the docstrings, which give shapes, units, errors, cost and source, and each name
leads to its line of source, and each file to the lessons that teach it. What the folder itself
offers stands first. Sphinx reads such a page from a file that holds the folder's name.
"""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from docutils.nodes import make_id
from sphinx import addnodes
from sphinx.parsers import Parser

from coursesite.docstrings import rendered
from coursesite.links import ROOT, reference_page, source_page
from coursesite.objects import Defined, defined_in, docstring_of, offered_by, parsed
from coursesite.taught import Taught, lessons_by_file

REPOSITORY = Path(__file__).parents[3]
TOP = "minidist"


class FolderParser(Parser):
    """Read a file that names a folder of the package."""

    supported = ("folder",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Fill in the page of a folder."""
        folder = inputstring.strip()
        path = REPOSITORY / folder
        for text in (REPOSITORY / "lessons").glob("*/README.md"):
            self._env.note_dependency(str(text))  # which says what it teaches
        page = nodes.section(ids=["top"], names=["top"])
        page += nodes.title("", "The package" if folder == TOP else folder)
        init = path / "__init__.py"
        if init.exists():
            self._env.note_dependency(str(init))
            for node in rendered(docstring_of(parsed(init))):
                page += node
        if below := folders_below(folder):
            page += contents(below)
        offered = offered_by(parsed(init), folder) if init.exists() else {}
        for file in sorted(path.glob("*.py"), key=lambda file: (-offered.get(file.stem, 0), file)):
            if file.name != "__init__.py":
                page += self.file_section(file, document)
        document += page

    def file_section(self, file: Path, document: nodes.document) -> nodes.section:
        """Return the section of one file."""
        name = file.relative_to(REPOSITORY).as_posix()
        section = nodes.section(ids=[make_id(file.stem)], names=[file.name])
        title = nodes.title("", "", nodes.literal(file.name, file.name))
        section += title
        self._env.note_dependency(str(file))
        tree = parsed(file)
        for node in rendered(docstring_of(tree)):
            section += node
        address = f"{ROOT}{source_page(name)}"
        section += nodes.paragraph("", "", nodes.reference("", f"All of {name}", refuri=address))
        if lessons := lessons_by_file(REPOSITORY).get(name):
            section += taught_in(lessons)
        module = name.removesuffix(".py").replace("/", ".")
        for found in defined_in(tree):
            section += self.description(found, module, address)
        return section

    def description(self, found: Defined, owner: str, address: str) -> addnodes.desc:
        """Return the signature of a function or a class, its words, and what belongs to it."""
        full = f"{owner}.{found.name}"
        self._env.domains.python_domain.note_object(full, found.kind, full)
        signature = addnodes.desc_signature("", "", ids=[full], fullname=found.name)
        signature["_toc_parts"] = ()
        if found.kind in ("class", "property"):
            signature += addnodes.desc_annotation("", "", nodes.Text(f"{found.kind} "))
        signature += addnodes.desc_name("", found.name)
        signature += nodes.inline("", found.signature, classes=["signature"])
        line = nodes.reference(
            "", "source", refuri=f"{address}#L{found.line}", classes=["to-source"]
        )
        signature += line
        content = addnodes.desc_content("", *rendered(found.docstring))
        for member in found.members:
            content += self.description(member, full, address)
        return addnodes.desc("", signature, content, domain="py", objtype=found.kind)


def taught_in(lessons: tuple[Taught, ...]) -> nodes.paragraph:
    """Return the line that says which lessons teach a file."""
    line = nodes.paragraph("", "Taught in ", classes=["taught-in"])
    for place, lesson in enumerate(lessons):
        line += [nodes.Text(", ")] * (place > 0)
        line += nodes.reference("", lesson.title, refuri=f"{ROOT}{lesson.page}", internal=True)
    return line


def folders_below(folder: str) -> list[str]:
    """Return the folders directly inside one that have code."""
    inside = sorted((REPOSITORY / folder).iterdir())
    found = [path for path in inside if path.is_dir() and any(path.glob("*.py"))]
    return [path.relative_to(REPOSITORY).as_posix() for path in found]


def contents(folders: list[str]) -> nodes.Node:
    """Return a table of contents of the pages of folders."""
    names = [reference_page(folder) for folder in folders]
    tree = addnodes.toctree(
        entries=[(None, name) for name in names],
        includefiles=names,
        parent="",
        maxdepth=1,
        caption=None,
        glob=False,
        hidden=False,
        includehidden=False,
        numbered=0,
        titlesonly=True,
    )
    return nodes.compound("", tree, classes=["toctree-wrapper"])

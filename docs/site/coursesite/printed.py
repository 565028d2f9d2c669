"""Each number that a text takes from a run leads to what was printed, and to the command that
prints it.

    ```python                 what a reader can run
    for algorithm in ...
    ```
    ```                       what it prints; a line below says by what
    ring [(6, 6000000), ...
    ```
    ... 6,000,000 bytes ...   in the text of the page, a number that was printed is a link to it

A number counts if it has three digits, or a point: `6,000,000`, `4.2`, and only in the part of the
page in which it was printed. A shorter one, or one far away, could be something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from docutils import nodes

NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w/-])")
COMMAND = re.compile(r"^(?:mpirun|torchrun|python3?|make) \S")
READING = "Further reading"
NO_TEXT = (nodes.reference, nodes.literal, nodes.literal_block, nodes.title, nodes.raw)


def link_printed_numbers(doctree: nodes.document, programs: str = "") -> None:
    """Give each printed block a place and a line that says what prints it, and link the numbers.

    Parameters
    ----------
    programs : str
        The address of the file that has all programs of the page, where there is one.
    """
    found: dict[nodes.Node | None, dict[str, str]] = {}
    for count, (block, by) in enumerate(list(printed_blocks(doctree)), start=1):
        name = f"printed-{count}"
        block["ids"].append(name)
        note = nodes.paragraph("", "", *said_by(by, programs), classes=["printed-by"])
        block.parent.insert(block.parent.index(block) + 1, note)
        of_section = found.setdefault(section_of(block), {})
        for number in NUMBER.findall(block.astext()):
            if counts(number):
                of_section.setdefault(plain(number), name)
    for text in list(doctree.findall(nodes.Text)):
        of_section = found.get(section_of(text), {})
        if (
            of_section
            and not inside(text, NO_TEXT)
            and not is_reading(text)
            and "printed-by" not in text.parent.get("classes", ())
        ):
            text.parent.replace(text, list(linked(text.astext(), of_section)))


def printed_blocks(doctree: nodes.document) -> Iterator[tuple[nodes.Element, nodes.Element]]:
    """Yield each block that a command prints, and what says the command."""
    for block in doctree.findall(nodes.literal_block):
        if block.get("language", "none") not in ("none", "default", "text") or is_command(block):
            continue
        place = block.parent.index(block)
        before = block.parent[place - 1] if place else None
        if isinstance(before, nodes.literal_block):
            if before.get("language") == "python" or is_command(before):
                yield block, before
        elif isinstance(before, nodes.paragraph):
            commands = [each for each in before.findall(nodes.literal) if is_command(each)]
            if commands:
                yield block, commands[-1]


def is_command(node: nodes.Element) -> bool:
    """Tell whether a piece of code is a command for a shell."""
    return bool(COMMAND.match(node.astext()))


def said_by(command: nodes.Element, programs: str) -> Iterator[nodes.Node]:
    """Yield the words of the line below a printed block."""
    yield nodes.Text("printed by ")
    if isinstance(command, nodes.literal):
        yield nodes.literal("", command.astext())
    elif is_command(command):
        yield nodes.Text("the command above")
    else:
        yield nodes.Text("the program above")
        if programs:
            name = programs.rpartition("/")[2]
            yield nodes.Text("; all of this page: ")
            code = nodes.literal("", f"python {name}")
            yield nodes.reference("", "", code, refuri=programs, internal=True)


def counts(number: str) -> bool:
    """Tell whether a number is long enough to mean one thing only."""
    return "." in number or len(re.sub(r"\D", "", number)) >= 3


def plain(number: str) -> str:
    """Return a number without the commas between its thousands."""
    return number.replace(",", "")


def section_of(node: nodes.Node) -> nodes.Node | None:
    """Return the part of the page that a node stands in."""
    parent = node.parent
    while parent is not None and not isinstance(parent, nodes.section):
        parent = parent.parent
    return parent


def inside(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
    """Tell whether a node stands in one of these kinds."""
    parent = node.parent
    while parent is not None:
        if isinstance(parent, kinds):
            return True
        parent = parent.parent
    return False


def is_reading(node: nodes.Node) -> bool:
    """Tell whether a node stands in the list of what to read, whose numbers are years."""
    parent = node.parent
    while parent is not None:
        if isinstance(parent, nodes.section) and parent[0].astext() == READING:
            return True
        parent = parent.parent
    return False


def linked(text: str, found: dict[str, str]) -> Iterator[nodes.Node]:
    """Yield a text with links on the numbers that were printed."""
    end = 0
    for number in NUMBER.finditer(text):
        name = found.get(plain(number[0])) if counts(number[0]) else None
        if name:
            yield nodes.Text(text[end : number.start()])
            yield nodes.reference("", number[0], refid=name, internal=True, classes=["to-printed"])
            end = number.end()
    yield nodes.Text(text[end:])

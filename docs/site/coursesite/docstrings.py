"""A docstring as a piece of a page: paragraphs, lists, drawings, and NumPy's sections.

Return the sum of all ranks' chunk.            a paragraph; `words in these` are code

    rank 0 ──▶ rank 1                          a drawing stays as it is: lines that are indented, or
                                               that have wide gaps
Raises                                         a section: a list of names with what they mean
------
ValueError
    If the buffer is not one-dimensional.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from docutils import nodes

WORD = re.compile(
    r"`([^`]+)`|\*\*([^*\s][^*]*)\*\*|(?<![\w*])\*([^*\s](?:[^*]*[^*\s])?)\*(?![\w*])"
    r"|(https?://[^\s,;)]+[^\s,;.)])"
)
RULE = re.compile(r"-{3,}$")
ITEM = re.compile(r"(?:-|\d+\.) +")
GAP = re.compile(r"\S {3,}\S|[│├└╰╭┌▶◀▼▲]|──")
LISTED = ("Parameters", "Attributes", "Raises", "Yields", "Returns", "Warns")


def rendered(docstring: str) -> list[nodes.Node]:
    """Return a docstring as nodes of a page."""
    found: list[nodes.Node] = []
    for head, lines in sections_of(docstring.splitlines()):
        if head:
            found.append(nodes.rubric("", head))
        if head in LISTED and any(line.startswith(" ") for line in lines):
            found.append(definitions(lines))
        else:
            found.extend(prose(lines))
    return found


def sections_of(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the head of each section and its lines; what stands before the first has no head."""
    starts = [
        number
        for number, (line, rule) in enumerate(pairwise(lines))
        if RULE.match(rule) and line and not line.startswith(" ") and len(line.split()) <= 2
    ]
    yield "", lines[: starts[0]] if starts else lines
    for start, end in pairwise([*starts, len(lines)]):
        yield lines[start], lines[start + 2 : end]


def prose(lines: list[str]) -> Iterator[nodes.Node]:
    """Yield paragraphs, lists and drawings."""
    drawing: list[str] = []
    for block in blocks_of(lines):
        if is_drawing(block):
            drawing += [*([""] if drawing else []), *block]
            continue
        if drawing:
            yield literal(drawing)
            drawing = []
        yield from words_of(block)
    if drawing:
        yield literal(drawing)


def words_of(block: list[str]) -> Iterator[nodes.Node]:
    """Yield a paragraph, and the list or the drawing that follows it without a blank line."""
    lead = next((at for at, line in enumerate(block) if ITEM.match(line)), len(block))
    text, rest = block[:lead], block[lead:]
    indented = next((at for at, line in enumerate(text) if line.startswith("  ")), len(text))
    if text[:indented]:
        yield nodes.paragraph("", "", *inline(" ".join(text[:indented])))
    if text[indented:]:
        yield literal(text[indented:])
    if rest:
        yield listed(rest)


def blocks_of(lines: list[str]) -> Iterator[list[str]]:
    """Yield the runs of lines between blank ones."""
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line.rstrip())
        elif block:
            yield block
            block = []


def is_drawing(block: list[str]) -> bool:
    """Tell whether lines are to stay as they are."""
    if ITEM.match(block[0]):
        return False
    return block[0].startswith("  ") or any(GAP.search(line) for line in block)


def literal(lines: list[str]) -> nodes.Node:
    """Return lines as they are, without the indentation that all have."""
    margin = min(len(line) - len(line.lstrip()) for line in lines if line)
    text = "\n".join(line[margin:] for line in lines)
    return nodes.literal_block(text, text, language="none")


def listed(lines: list[str]) -> nodes.Node:
    """Return a list, whose items may go over several lines."""
    items: list[str] = []
    for line in lines:
        if ITEM.match(line):
            items.append(ITEM.sub("", line, count=1))
        else:
            items[-1] += " " + line.strip()
    numbered = lines[0][0].isdigit()
    holder = nodes.enumerated_list() if numbered else nodes.bullet_list()
    for item in items:
        holder += nodes.list_item("", nodes.paragraph("", "", *inline(item)))
    return holder


def definitions(lines: list[str]) -> nodes.Node:
    """Return a list of names and what each means, as NumPy's sections have it."""
    entries: list[tuple[str, list[str]]] = []
    for line in lines:
        if line and not line.startswith(" "):
            entries.append((line, []))
        elif entries:
            entries[-1][1].append(line[4:])
    holder = nodes.definition_list()
    for name, text in entries:
        word, colon, kind = name.partition(" : ")
        term = nodes.term("", "", nodes.literal(word, word))
        if colon:
            term += nodes.Text(f" : {kind}")
        meaning = nodes.definition("", *prose(text))
        holder += nodes.definition_list_item("", term, meaning)
    return holder


def inline(text: str) -> Iterator[nodes.Node]:
    """Yield a line of words, with its code and its addresses."""
    end = 0
    for found in WORD.finditer(text):
        if found.start() > end:
            yield nodes.Text(text[end : found.start()])
        code, strong, stressed, address = found.groups()
        if code:
            yield nodes.literal(code, code)
        elif strong:
            yield nodes.strong(strong, strong)
        elif stressed:
            yield nodes.emphasis(stressed, stressed)
        else:
            yield nodes.reference(address, address, refuri=address)
        end = found.end()
    if end < len(text):
        yield nodes.Text(text[end:])

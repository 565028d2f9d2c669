"""A page for each source file, on which every line has a place to link to: `ring.py.html#L36`.

These pages are written without Sphinx: they need no menu, and there are some hundred of them.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name, guess_lexer_for_filename
from pygments.util import ClassNotFound

from coursesite.links import reference_page, source_page

PAGE = Template(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$file · minidist</title>
<meta name="description" content="The source of $file, with a place to link to for each line.">
<link rel="icon" href="${up}_static/favicon.svg">
<link rel="stylesheet" href="${up}_static/source.css">
</head><body>
<header><a href="${up}index.html">minidist</a> · <a href="$reference">reference</a></header>
<main><h1>$file</h1>
<pre><code>$lines</code></pre>
</main></body></html>
"""
)


def write_source_page(repository: Path, file: str, site: Path) -> None:
    """Write the page of one file, given from the root of the repository."""
    target = site / source_page(file)
    text = (repository / file).read_text(encoding="utf-8")
    up = "../" * (len(Path(source_page(file)).parts) - 1)
    about = f"{reference_page(str(Path(file).parent))}.html"
    reference = about if file.startswith("minidist/") else "lessons/index.html"
    page = PAGE.substitute(
        file=escape(file), up=up, reference=up + reference, lines="\n".join(lines_of(text, file))
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")


def lines_of(text: str, file: str) -> list[str]:
    """Return the lines as HTML, in colours where the language is known."""
    try:
        lexer = guess_lexer_for_filename(file, text)
    except ClassNotFound:
        lexer = get_lexer_by_name("text")
    html = highlight(text, lexer, HtmlFormatter(nowrap=True)).rstrip("\n")
    return [
        f'<a id="L{number}" href="#L{number}">{number}</a>{line}'
        for number, line in enumerate(html.split("\n"), start=1)
    ]

"""`python -m minidist course notebooks`: execute the sources of the notebooks and write them with
their outputs.

    notebooks/src/02_ring_all_reduce.py ──▶ cells ──▶ a kernel ──▶ notebooks/02_ring_all_reduce.ipynb

The source is a script whose cells begin with `# %%` or `# %% [markdown]` (py:percent). The same
source gives the same file: cells are numbered, and nothing tells when or where they ran. The answer
to a prediction is folded until the reader opens it, and so is long code that draws the first picture.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minidist.course.lesson import GradeError

MOST_BYTES = 300_000  # of one notebook with its outputs
SECONDS = 120  # for one cell
PREDICTION = "**Predict:**"  # asks for what the next cell prints
LONGEST_OPENING = 40  # lines of the first program: a longer one is folded


def build_notebooks(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Write `folder/NAME.ipynb` for each `folder/src/NAME.py`, or for those whose name begins with
    one of `names`.

    Needs jupytext, nbclient and a kernel.

    Raises
    ------
    GradeError
        If there is no such source, or a notebook grows larger than 300 kB.
    nbclient.exceptions.CellExecutionError
        If a cell raises, and is not tagged `raises-exception`.
    """
    sources = [
        path
        for path in sorted((folder / "src").glob("*.py"))
        if path.name.startswith(tuple(names) or "")
    ]
    if not sources:
        raise GradeError(
            f"there are no sources {', '.join(names)} in {folder / 'src'}: name another folder or "
            "number"
        )
    return [build_notebook(source, folder / f"{source.stem}.ipynb") for source in sources]


def build_notebook(source: Path, target: Path) -> Path:
    """Execute one source and write the notebook."""
    import nbformat
    from nbclient import NotebookClient

    notebook = cells_of(source)
    # in whichever pieces a kernel's prints arrive
    options = {"record_timing": False, "coalesce_streams": True}
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", **options).execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
    }
    text = nbformat.writes(notebook) + "\n"
    if len(text) > MOST_BYTES:
        raise GradeError(
            f"{target.name} has {len(text):,} bytes, at most {MOST_BYTES:,}: show fewer steps or "
            "frames"
        )
    target.write_text(text, encoding="utf-8")
    return target


def cells_of(source: Path) -> Any:
    """Return a notebook of a source's cells, without outputs."""
    import jupytext

    notebook = jupytext.read(source, fmt="py:percent")
    question = False
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        # its output is the answer, for JupyterLab and for older Jupyters
        if cell.cell_type == "code" and question:
            cell.metadata |= {"jupyter": {"outputs_hidden": True}, "collapsed": True}
        question = cell.cell_type == "markdown" and PREDICTION in cell.source
    for opening in [cell for cell in notebook.cells if cell.cell_type == "code"][:1]:
        if len(opening.source.splitlines()) > LONGEST_OPENING:
            opening.metadata["jupyter"] = {"source_hidden": True}
    return notebook

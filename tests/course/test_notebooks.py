"""Every notebook executes, and gives what is committed: the same text and figure data, pictures
within a tolerance.
"""

from __future__ import annotations

import base64
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from matplotlib import image
from ranks import warm_environment, warm_python

from minidist.course.lesson import GradeError
from minidist.course.notebooks import MOST_BYTES, PREDICTION, build_notebooks, cells_of

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
KERNEL = """
import os, sys
from ipykernel.kernelapp import launch_new_instance
if hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))  # simulated ranks take turns: on one core in half the time
    os.sched_setaffinity(0, {cores[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % len(cores)]})
launch_new_instance()
"""
IMPORTED = ("ipykernel.kernelapp", "matplotlib.figure", "matplotlib.backends.backend_agg")
# whose cells on real processes every run of the tests executes: without torch, and with it
REAL = ("02", "11")
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# whose cells take longest: in the long run; what they tell, other tests of their lessons check
LONG = ("03", "04", "05", "14", "16", "19", "22", "your_program")
FAR = 0.02  # mean distance of pixels, of 1, between versions of the library that draws


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KernelSpecManager:
    """Return the one kernel that there is: it is forked off a process that has imported what
    notebooks do.
    """
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernel.py").write_text(KERNEL)
    command = [*warm_python(*IMPORTED), str(folder / "kernel.py"), "-f", "{connection_file}"]
    (folder / "python3").mkdir()
    (folder / "python3/kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "", "language": "python"})
    )
    return KernelSpecManager(kernel_dirs=[str(folder)])


def execute(path: Path, kernels: KernelSpecManager, folder: Path, real: bool) -> Any:
    """Execute a notebook in `folder`, with its cells on real processes or without; return it with
    its outputs.
    """
    from nbclient import NotebookClient

    notebook = read(path)
    for cell in notebook.cells:
        if is_real(cell) and not real:
            cell.source = ""
    # of its own: kernels that begin together may choose the same ports
    with tempfile.TemporaryDirectory() as sockets:
        files = {"transport": "ipc", "connection_file": str(Path(sockets, "kernel.json"))}
        manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels, **files)
        client = NotebookClient(
            notebook, km=manager, timeout=120, resources={"metadata": {"path": str(folder)}}
        )
        client.execute(env=warm_environment(*IMPORTED), cleanup_kc=True)
    return notebook


def read(path: Path) -> Any:
    """Read a notebook. To import what does it takes two seconds, which other tests need not wait for."""
    import nbformat

    return nbformat.read(path, 4)


def is_real(cell: Any) -> bool:
    """Tell whether a cell starts real processes, whose lines come in any order."""
    return "real" in cell.metadata.get("tags", ())


@pytest.mark.soak
@pytest.mark.timeout(300)
@EACH
def test_all_cells_execute_also_on_real_processes(
    path: Path, kernels: KernelSpecManager, tmp_path: Path
) -> None:
    execute(path, kernels, tmp_path, real=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.soak] * path.stem.startswith(LONG), id=path.stem)
        for path in NOTEBOOKS
    ],
)
def test_executing_again_gives_what_is_committed(
    path: Path, kernels: KernelSpecManager, tmp_path: Path
) -> None:
    committed, again = (
        read(path),
        execute(path, kernels, tmp_path, real=path.stem[:2] in REAL),
    )
    for before, now in zip(committed.cells, again.cells, strict=True):
        if before.cell_type == "code" and not is_real(before):
            for kept, found in zip(whole(before.outputs), whole(now.outputs), strict=True):
                compare(kept, found)


def whole(outputs: list[Any]) -> list[Any]:
    """Put printed text together that came in pieces."""
    joined: list[Any] = []
    for output in outputs:
        if joined and output.output_type == "stream" and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def compare(kept: Any, found: Any) -> None:
    """Compare two outputs of a cell."""
    assert kept.output_type == found.output_type != "error"
    assert kept.get("text") == found.get("text")
    data, other = dict(kept.get("data", {})), dict(found.get("data", {}))
    pictures = data.pop("image/png", None), other.pop("image/png", None)
    assert data == other
    if pictures != (None, None):
        before, now = (
            image.imread(io.BytesIO(base64.b64decode(each)))[..., :3] for each in pictures
        )
        assert before.shape == now.shape
        assert np.abs(before - now).mean() < FAR


@EACH
def test_a_notebook_opens_with_a_picture_and_is_made_of_its_source(path: Path) -> None:
    notebook, source = read(path), cells_of(FOLDER / "src" / f"{path.stem}.py")
    assert [(cell.id, cell.source) for cell in notebook.cells] == [
        (cell.id, cell.source) for cell in source.cells
    ]
    assert path.stat().st_size <= MOST_BYTES
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[1] is first
    folded = first.metadata.get("jupyter", {}).get("source_hidden", False)
    assert folded == (len(first.source.splitlines()) > 40), "a page of code before the picture"
    assert any(
        {"image/png", "image/svg+xml"} & set(output.get("data", {})) for output in first.outputs
    )
    text = "\n".join(cell.source for cell in notebook.cells)
    assert text.count("**Predict:**") >= 3 and "Break it" in text
    asked = [
        before
        for before in notebook.cells
        if before.cell_type == "markdown" and PREDICTION in before.source
    ]
    answers = [
        cell for cell in notebook.cells if cell.metadata.get("jupyter", {}).get("outputs_hidden")
    ]
    assert len(answers) == len(asked) and all(
        cell.metadata["collapsed"] and cell.outputs for cell in answers
    )
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        for kind in {"image/png", "image/svg+xml"} & set(output.get("data", {})):
            assert (
                len(output.metadata[kind]["alt"]) > 40
                and output.data["text/plain"] == output.metadata[kind]["alt"]
            )
    assert "/tmp/" not in path.read_text() and any(map(is_real, notebook.cells))


def test_every_source_has_a_notebook() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(
        path.stem for path in FOLDER.glob("src/*.py")
    )


def test_a_notebook_that_grows_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/00_large.py").write_text(f"# %% [markdown]\n# {'x' * MOST_BYTES}\n")
    with pytest.raises(GradeError, match="at most 300,000: show fewer"):
        build_notebooks(tmp_path)
    with pytest.raises(GradeError, match="there are no sources 99 in"):
        build_notebooks(tmp_path, ["99"])

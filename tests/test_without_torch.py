"""A Python that has numpy and nothing else plans, checks, simulates and draws.

It is a real one: a virtual environment into which numpy is linked, so neither torch nor mpi4py can
be found. Nothing is downloaded.
"""

import subprocess
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

from minidist.cli.plan.command import main
from minidist.cli.plan.runnable import UNASKED

ROOT = Path(__file__).parents[1]
PLAN = "plan --model llama-70b --cluster h100:64 --tokens 1.4T"

SCHEDULES = """
from minidist.draw.pipeline import draw_svg, draw_text
from minidist.full.pipeline import (
    NAMES, check, peak_activations, peak_deferred, plan, read_plan, simulate, with_communication
)

for name in NAMES:
    chunks = 2 if name in ("interleaved", "zb1p") else 1
    made = plan(name, 4, 8, chunks)
    check(made)
    check(with_communication(made))
    assert read_plan(made.text()) == made, name
    timeline = simulate(made)
    assert timeline.length > 0 and max(peak_activations(made)) > 0 <= max(peak_deferred(made)), name
    drawn = draw_text(timeline).splitlines()
    assert [line[:6] for line in drawn[:4]] == ["rank 0", "rank 1", "rank 2", "rank 3"], name
    assert "<svg" in draw_svg(timeline), name
print(*NAMES)
"""

PREDICTION = """
from minidist.full.mesh import Layout
from minidist.full.model import GPTConfig
from minidist.plan import layer_activations, model_states
from minidist.plan.device import machine
from minidist.plan.model import model
from minidist.plan.run import Setup
from minidist.plan.search import search

sizes = GPTConfig(vocabulary=50_304, layers=4, hidden=256, heads=8)
assert sizes.parameter_count > 1e6 < model_states(sizes.parameter_count).parameters
assert layer_activations(128, 1, 256, 8) > 0
print(Layout(dp=2, pp=2, tp=2))
answer = search(Setup(model("llama-8b"), machine("h100:16"), 4096, 256), {}, 0.05)
assert answer.groups()[0][0].seconds > 0
"""

TORCH = """
import minidist.full.model, minidist.full
for package, name in ((minidist.full.model, "GPT"), (minidist.full, "DDP")):
    try:
        getattr(package, name)
    except ModuleNotFoundError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python that has numpy and this package, and no other library."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python3*/site-packages"))
    spec = find_spec("numpy")
    assert spec and spec.origin
    numpy = Path(spec.origin).parent
    for needed in (numpy, numpy.with_name("numpy.libs")):  # the latter has what numpy loads
        if needed.exists():
            (packages / needed.name).symlink_to(needed)
    (packages / "minidist.pth").write_text(f"{ROOT}\n")
    found = folder / "bin" / "python"
    absent = "from importlib.util import find_spec; print(find_spec('torch'), find_spec('mpi4py'))"
    assert run(found, "-c", absent) == "None None\n"
    return found


def run(python: Path, *words: str, status: int = 0) -> str:
    """Run a Python, without what the environment would add to it; return what it prints."""
    done = subprocess.run([python, "-I", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def test_all_schedules_are_planned_checked_simulated_and_drawn(python: Path) -> None:
    assert "zb-h1" in run(python, "-c", SCHEDULES)


def test_runs_are_predicted_and_layouts_drawn(python: Path) -> None:
    assert run(python, "-c", PREDICTION).startswith("8 ranks: dp=2 × pp=2 × tp=2\n")


def test_what_needs_torch_says_so_when_it_is_asked_for(python: Path) -> None:
    assert run(python, "-c", TORCH) == "No module named 'torch'\n" * 2


def test_the_command_answers_as_it_does_with_torch(
    python: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but one line is the same: `train` cannot say what it needs of a host."""
    without = run(python, "-m", "minidist", *PLAN.split()).splitlines()
    assert main(PLAN.split()[1:]) == 0
    with_torch = capsys.readouterr().out.splitlines()
    differing = [pair for pair in zip(without, with_torch, strict=True) if pair[0] != pair[1]]
    assert [pair[0] for pair in differing] == [UNASKED]
    assert "train asks a node for" in differing[0][1]


def test_only_measuring_this_machine_needs_torch(python: Path) -> None:
    said = run(python, "-m", "minidist", "plan", "--cluster", "here", status=2)
    assert said == (
        "plan: --cluster here trains a small model on this machine, which takes torch (No module "
        "named 'torch'): pip install torch, or name a cluster, as in --cluster h100:64\n"
    )


@pytest.mark.parametrize(
    "command", ["train", "stages", "export", "bench engines --engines threads"]
)
def test_a_command_that_needs_torch_says_so(python: Path, command: str) -> None:
    said = run(python, "-m", "minidist", *command.split(), status=2)
    name = command.split()[0]
    assert (
        said
        == f"minidist {name} needs the library torch, which is not installed: pip install torch\n"
    )

"""The zip that Gradescope's autograder is made of.

    setup.sh           run once, as root: Python's packages, and a user without rights
    run_autograder     run for each submission: python -m minidist grade ... ──▶ results/results.json
    minidist/          this package
    lessons/02_.../    the exercise and its checks, hidden ones too; no solution, no mistake

There they lie in `/autograder/source`, the submission in `/autograder/submission`, and the results
are expected in `/autograder/results`:
https://gradescope-autograders.readthedocs.io/en/latest/specs/
"""

import zipfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from minidist.course.lesson import GradeError, Lesson

PACKAGE = Path(__file__).parents[1]
NEEDED = ("numpy", "mpi4py", "mpich", "safetensors")  # lines of requirements.txt, and torch
PARTS = ("exercise.py", "checks.py", "judges*.py")
DATA = (".html", ".svg", ".toml")  # that the package reads
# folders that an installed package has inside, with all solutions
COURSE = ("lessons", "notebooks")


def package(lesson: Lesson, out: Path, seed: int) -> Path:
    """Write the zip for one lesson to `out`, graded there with `seed`; return its path.

    Raises
    ------
    GradeError
        If there is something at `out` already, or nothing says what the package requires.
    """
    if out.exists():
        raise GradeError(f"{out} exists already: name another file with --out, or remove it first")
    lines = [f"'{line}'" for line in requirements()]
    needed = " ".join(line for line in lines if line.startswith(NEEDED, 1))
    torch = next(line for line in lines if line.startswith("torch", 1))
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for script in sorted(Path(__file__).with_name("autograder").iterdir()):
            text = script.read_text(encoding="utf-8")
            text = text.replace("{{requirements}}", needed)
            text = text.replace("{{torch}}", torch)
            text = text.replace("{{lesson}}", lesson.name)
            text = text.replace("{{seed}}", str(seed))
            entry = zipfile.ZipInfo(script.name)
            entry.external_attr = 0o100755 << 16  # a file that may be executed
            file.writestr(entry, text)
        for path in sorted(PACKAGE.rglob("*")):
            if path.suffix in (".py", *DATA) and path.relative_to(PACKAGE).parts[0] not in COURSE:
                file.write(path, path.relative_to(PACKAGE.parent))
        for name in PARTS:
            for path in sorted(lesson.folder.glob(name)):
                file.write(path, Path("lessons", lesson.name, path.name))
    return out


def requirements() -> list[str]:
    """Return what the package runs on: the lines of a checkout's `requirements.txt`, or what was
    installed with it.
    """
    file = PACKAGE.parent / "requirements.txt"
    if file.is_file():
        lines = file.read_text(encoding="utf-8").splitlines()
        return [line.partition("#")[0].strip() for line in lines]
    try:
        return [line for line in requires("minidist") or [] if "extra ==" not in line]
    except PackageNotFoundError:
        fix = "build the zip from a checkout of minidist, or pip install it"
        raise GradeError(
            f"there is no {file}, and minidist is not installed either: {fix}"
        ) from None

"""Break the package by hand, a line at a time, and see a test turn red: `make mutants`, which takes
minutes.

    copy 0    all tests ─▶ green │ break ─▶ its tests ─▶ red? ─▶ mend │ break ─▶ ...
    copy 1    all tests ─▶ green │ break ─▶ its tests ─▶ red? ─▶ mend │ break ─▶ ...

`mutations.py` says what to break, and which tests must notice. A test that stays green is a
finding: it promises more than it checks. Each run of pytest is forked off a process that has
imported torch, which takes longer than most tests.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from mutations import MUTATIONS, Mutation

REPOSITORY = Path(__file__).resolve().parents[2]
WORKERS = 2
FAILED = 1  # what pytest says of a test that failed; 2 to 5 say that it could not run it
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-n", "0", "--timeout", "120")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Break the package, one line at a time, and see a test turn red."
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only the mutations whose names contain TEXT"
    )
    text = parser.parse_args().only
    chosen = [mutation for mutation in MUTATIONS if text in mutation.name]
    if not chosen:
        print(f"no mutation's name contains {text!r}", file=sys.stderr)
        return 2
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["torch", "hypothesis", "pytest"])
    started, free = time.monotonic(), SimpleQueue[Path]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORKERS) as pool:
        copies = [
            copy_of_the_repository(Path(folder).resolve() / f"copy{number}")
            for number in range(WORKERS)
        ]
        tests = sorted({test for mutation in chosen for test in mutation.tests})
        for status, said in pool.map(
            run_tests, copies, [tests[number::WORKERS] for number in range(WORKERS)]
        ):
            if status:
                print(f"unbroken, all these tests must be green:\n{said}", file=sys.stderr)
                return 2
        print(
            f"unbroken, all {len(tests)} tests are green, after {time.monotonic() - started:.0f} s",
            flush=True,
        )
        for copy in copies:
            free.put(copy)
        killed = list(pool.map(lambda mutation: is_killed(mutation, free), chosen))
    print(f"{sum(killed)} of {len(killed)} killed, after {time.monotonic() - started:.0f} s")
    return 0 if all(killed) else 1


def copy_of_the_repository(copy: Path) -> Path:
    """Copy the files that git tracks, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():  # or it was deleted, and not committed yet
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, copy / name)
    return copy


def is_killed(mutation: Mutation, free: SimpleQueue[Path]) -> bool:
    """Break a copy that is free, run the mutation's tests there, mend it, print a line; tell
    whether a test failed.
    """
    copy, started = free.get(), time.monotonic()
    file = copy / mutation.file
    whole = file.read_text(encoding="utf-8")
    try:
        file.write_text(mutation.broken(whole), encoding="utf-8")
        status, said = run_tests(copy, mutation.tests, broken=True)
    finally:
        file.write_text(whole, encoding="utf-8")
        free.put(copy)
    if status not in (0, FAILED):
        raise RuntimeError(f"{mutation.name}: pytest ended with status {status}:\n{said}")
    verdict = "killed  " if status == FAILED else "SURVIVED"
    print(f"{verdict} {time.monotonic() - started:4.0f} s  {mutation.name}", flush=True)
    return status == FAILED


def run_tests(copy: Path, tests: Sequence[str], broken: bool = False) -> tuple[int, str]:
    """Run tests in a copy, in a process of their own; return pytest's exit status, and what it
    printed.
    """
    if not tests:
        return 0, ""
    said = copy / "said.txt"
    process = multiprocessing.Process(target=run_pytest, args=(copy, tests, broken, said))
    process.start()
    process.join()
    return process.exitcode or 0, said.read_text(encoding="utf-8", errors="replace")


def run_pytest(copy: Path, tests: Sequence[str], broken: bool, said: Path) -> None:
    """Be pytest, in a copy; all that tests start imports the copy, too."""
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1), os.dup2(output, 2)
    os.chdir(copy)
    sys.path[:] = [
        str(copy),
        *(path for path in sys.path if path not in (str(REPOSITORY), str(Path(__file__).parent))),
    ]
    worker = f"gw{copy.name.removeprefix('copy')}"  # has a core of its own: see conftest.py
    os.environ |= {"PYTHONPATH": str(copy), "PYTEST_XDIST_WORKER": worker}
    # and mended, perhaps, within the second by which Python tells versions of a file: keep no
    # bytecode
    if broken:
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    # torch, imported before the fork, has found the package's entry point in the repository
    for name in [name for name in sys.modules if name.partition(".")[0] == "minidist"]:
        del sys.modules[name]
    import minidist

    assert Path(minidist.__file__).is_relative_to(copy), (
        f"Python imports {minidist.__file__}, not the copy"
    )
    import pytest

    sys.exit(pytest.main([*PYTEST, *tests]))


if __name__ == "__main__":
    sys.exit(main())

"""Build the site: `python docs/site/build.py --to site`.

    --pyodide FOLDER   put this copy of Pyodide beside the pages, for a place without a network
    --jobs N           how many processes Sphinx may use

Needs no network. A warning ends it with an error.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
sys.path.insert(0, str(HERE))

from coursesite.lessons import files_to_copy  # noqa: E402
from coursesite.sources import write_source_page  # noqa: E402
from coursesite.stage import package_folders, pages_of, stage  # noqa: E402
from sphinx.cmd.build import build_main  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Build the site; return the exit status."""
    parser = argparse.ArgumentParser(description="Build the site.")
    parser.add_argument("--to", type=Path, default=REPOSITORY / "site", help="the folder (site)")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build/site")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(argv)
    begun = time.monotonic()
    pages = options.work / "pages"
    stage(REPOSITORY, pages)
    sphinx = ["-W", "--keep-going", "-q", "-j", str(options.jobs), "-c", str(HERE)]
    trees = ["-d", str(options.work / "doctrees")]
    status = build_main([*sphinx, *trees, str(pages), str(options.to)])
    if status:
        return status
    for file in sorted((REPOSITORY / "minidist").rglob("*.py")):
        write_source_page(REPOSITORY, file.relative_to(REPOSITORY).as_posix(), options.to)
    print(f"{time.monotonic() - begun:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

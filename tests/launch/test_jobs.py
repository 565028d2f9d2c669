"""A job is ended for certain, whenever Ctrl-C comes."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys

import pytest

from minidist.full.launch import jobs


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has another way to end a job")
def test_a_ctrl_c_while_processes_are_looked_for_still_ends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark, members = secrets.token_hex(8), jobs.members
    command = [sys.executable, "-c", "import time; time.sleep(100)"]
    process = subprocess.Popen(command, env={**os.environ, jobs.MARK: mark})
    looks = iter([True])

    def interrupted(root: int, mark: str) -> set[int]:
        if next(looks, False):
            raise KeyboardInterrupt
        return members(root, mark)

    monkeypatch.setattr(jobs, "members", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            jobs.end_job(process.pid, mark, grace=1.0)
        assert process.wait(20) == -9
    finally:
        process.kill()

"""Pages in a real browser, for tests: headless Chromium, spoken to by the DevTools protocol.

`firefox.py` has the same pages in Firefox: `BROWSERS` are the two, Firefox in the long run only.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
BROWSER = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium is installed: apt-get install chromium"
)

BROWSERS = ("chromium", pytest.param("firefox", marks=pytest.mark.soak))

# What the browser's own fields, such as sliders, know a key by.
KEYS = {"End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Page:
    """A page in a headless browser, spoken to over two pipes by the DevTools protocol."""

    def __init__(self, folder: Path) -> None:
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()
        flags = (
            "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --window-size=1100,900"
        )
        program = f'exec "$0" {flags} --user-data-dir="$1" 3<&{commands} 4>&{answers}'
        self.process = subprocess.Popen(
            ["bash", "-c", program, str(CHROMIUM), str(folder)],
            pass_fds=(commands, answers),
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self.number, self.session, self.rest = 0, "", b""
        self.errors: list[str] = []
        self.inside = "file:"  # so begins all that a page may load

    def attach(self) -> None:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: object) -> dict[str, Any]:
        self.number += 1
        command: dict[str, object] = {"id": self.number, "method": method, "params": params}
        os.write(
            self.commands,
            json.dumps(command | ({"sessionId": self.session} if self.session else {})).encode()
            + b"\0",
        )
        while True:
            answer = self.read()
            self.notice(answer)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]  # type: ignore[no-any-return]

    def notice(self, event: dict[str, Any]) -> None:
        """Note an error of the page, and a request that leads out of where it may load from."""
        told = event.get("params", {})
        if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.errors.append(json.dumps(told))
        if event.get("method") == "Runtime.consoleAPICalled" and told["type"] == "error":
            self.errors.append(json.dumps(told["args"]))
        if event.get("method") == "Network.requestWillBeSent":
            url = told["request"]["url"]
            if not url.startswith((self.inside, "data:")):
                self.errors.append(f"loads {url}")

    def read(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            more = os.read(self.answers, 1 << 16)
            assert more, "the browser has ended"
            self.rest += more
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)  # type: ignore[no-any-return]

    # ---------------------------------------------------------------- how a reader's browser is set

    def resize(self, width: int = 0, height: int = 900) -> None:
        """Give the page a window of this size; without one, that of the start."""
        if not width:
            self.ask("Emulation.clearDeviceMetricsOverride")
            return
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str = "", still: bool = False) -> None:
        """Show pages as to a reader who prefers `light` or `dark`, or that nothing moves."""
        features = [{"name": "prefers-color-scheme", "value": scheme}] if scheme else []
        if still:
            features.append({"name": "prefers-reduced-motion", "value": "reduce"})
        self.ask("Emulation.setEmulatedMedia", features=features)

    def allow_scripts(self, allowed: bool) -> None:
        """Let the scripts of the next pages run, or not."""
        self.ask("Emulation.setScriptExecutionDisabled", value=not allowed)

    @contextmanager
    def before_scripts(self, script: str) -> Iterator[None]:
        """Run a script in each page before its own."""
        added = self.ask("Page.addScriptToEvaluateOnNewDocument", source=script)
        yield
        self.ask("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])

    # ---------------------------------------------------------------- what a reader does and sees

    def open(self, html: str, file: Path) -> None:
        file.write_text(
            f'<!doctype html><meta charset="utf-8"><title>test</title>{html}', encoding="utf-8"
        )
        self.visit(file.as_uri())

    def visit(self, url: str) -> None:
        """Load a page, and wait until it is there."""
        self.errors.clear()
        self.ask("Page.navigate", url=url)
        limit = time.monotonic() + 60
        there = url.partition("#")[0] + " complete"
        while self.run("location.href.split('#')[0] + ' ' + document.readyState") != there:
            assert time.monotonic() < limit, f"{url} does not load"
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        return self.ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get(
            "value"
        )

    def press(self, key: str, times: int = 1) -> None:
        number = {"windowsVirtualKeyCode": KEYS[key]} if key in KEYS else {}
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, **number)

    def cells(self) -> dict[str, str]:
        """Return the text of each cell, by `rank buffer[number]`."""
        script = (
            "[...document.querySelectorAll('.cell')].map(c => [`${c.dataset.rank} "
            "${c.dataset.cell}`, c.textContent])"
        )
        return dict(self.run(script))

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({selector!r}).textContent"))

    def screenshot(self, file: Path, scheme: str) -> None:
        self.prefer(scheme)
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        os.close(self.commands)  # at which it ends
        os.close(self.answers)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def begin(browser: str, folder: Path) -> Page:
    """Return an empty page of a browser, whose profile is in `folder`; skip the test if it is not
    installed.
    """
    if browser == "firefox":
        from firefox import FirefoxPage  # which is made of the class above

        return FirefoxPage(folder)
    if CHROMIUM is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    page = Page(folder)
    page.attach()
    return page

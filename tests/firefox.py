"""The pages of `browser.py` in headless Firefox, spoken to by WebDriver BiDi, which it has built in.

What BiDi cannot set yet (light and dark, motion, scripts) are preferences of Firefox, which a
privileged script sets. The web socket is that of `websocket-client`, which jupyter brings.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import Page

FIREFOX = shutil.which("firefox") or shutil.which("firefox-esr")
FLAGS = ["--headless", "--no-remote", "--remote-debugging-port=0", "--remote-allow-system-access"]
LISTENS = re.compile(r"BiDi listening on (ws://\S+)")
# WebDriver's names of keys that write nothing
KEYS = {
    "Escape": "\ue00c",
    "Tab": "\ue004",
    "Enter": "\ue007",
    "End": "\ue010",
    "Home": "\ue011",
    "ArrowLeft": "\ue012",
    "ArrowUp": "\ue013",
    "ArrowRight": "\ue014",
    "ArrowDown": "\ue015",
}
SCHEMES = {"dark": 0, "light": 1, "": 2}  # of a preference: 2 is the system's
QUIET = """
user_pref("browser.shell.checkDefaultBrowser", false);
user_pref("datareporting.policy.dataSubmissionEnabled", false);
user_pref("app.normandy.enabled", false);
"""


class FirefoxPage(Page):
    """A page in headless Firefox."""

    def __init__(self, folder: Path) -> None:
        websocket = pytest.importorskip(
            "websocket", reason="no websocket-client is installed: jupyter brings it"
        )
        if FIREFOX is None:
            pytest.skip("no firefox is installed: apt-get install firefox-esr")
        (folder / "user.js").write_text(QUIET)
        log = folder / "log"  # a pipe that nobody reads would fill up
        with log.open("wb") as file:
            command = [FIREFOX, *FLAGS, "--profile", str(folder)]
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        limit = time.monotonic() + 60
        while not (found := LISTENS.search(log.read_text())):
            assert time.monotonic() < limit and self.process.poll() is None, log.read_text()
            time.sleep(0.05)
        address = f"{found[1]}/session"
        self.socket = websocket.create_connection(address, timeout=120, suppress_origin=True)
        self.number, self.errors, self.inside = 0, [], "file:"
        self.ask("session.new", capabilities={})
        self.ask("session.subscribe", events=["log.entryAdded", "network.beforeRequestSent"])
        self.tab = self.ask("browsingContext.getTree")["contexts"][0]["context"]
        everything = self.ask("browsingContext.getTree", **{"moz:scope": "chrome"})
        self.privileged = everything["contexts"][0]["context"]
        self.resize()

    def ask(self, method: str, **params: object) -> dict[str, Any]:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            answer = json.loads(self.socket.recv())
            self.notice(answer)
            if answer.get("id") == self.number:
                assert answer["type"] == "success", answer
                return answer["result"]  # type: ignore[no-any-return]

    def notice(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        if event.get("method") == "log.entryAdded" and told["level"] == "error":
            self.errors.append(json.dumps(told))
        if event.get("method") == "network.beforeRequestSent":
            url = told["request"]["url"]
            if told["context"] == self.tab and not url.startswith((self.inside, "data:", "blob:")):
                self.errors.append(f"loads {url}")

    def visit(self, url: str) -> None:
        self.errors.clear()
        self.ask("browsingContext.navigate", context=self.tab, url=url, wait="complete")

    def run(self, script: str) -> Any:
        return self.evaluate(script, self.tab)

    def evaluate(self, script: str, context: str) -> Any:
        """Return what a script gives, or None if it raises."""
        target = {"context": context}
        found = self.ask("script.evaluate", expression=script, target=target, awaitPromise=False)
        return plain(found["result"]) if found["type"] == "success" else None

    def press(self, key: str, times: int = 1) -> None:
        value = KEYS.get(key, key)
        strokes = [{"type": kind, "value": value} for kind in ("keyDown", "keyUp")]
        keyboard = {"type": "key", "id": "keyboard", "actions": strokes * times}
        self.ask("input.performActions", context=self.tab, actions=[keyboard])

    # ---------------------------------------------------------------- how a reader's browser is set

    def resize(self, width: int = 1100, height: int = 900) -> None:
        size = {"width": width, "height": height}
        self.ask("browsingContext.setViewport", context=self.tab, viewport=size)

    def prefer(self, scheme: str = "", still: bool = False) -> None:
        self.set("layout.css.prefers-color-scheme.content-override", SCHEMES[scheme])
        self.set("ui.prefersReducedMotion", int(still))

    def allow_scripts(self, allowed: bool) -> None:
        self.set("javascript.enabled", allowed)

    def set(self, preference: str, value: int | bool) -> None:
        """Set a preference of Firefox."""
        kind = "Bool" if isinstance(value, bool) else "Int"
        words = f"{json.dumps(preference)}, {json.dumps(value)}"
        self.evaluate(f"Services.prefs.set{kind}Pref({words})", self.privileged)

    @contextmanager
    def before_scripts(self, script: str) -> Iterator[None]:
        added = self.ask("script.addPreloadScript", functionDeclaration=f"() => {{ {script} }}")
        yield
        self.ask("script.removePreloadScript", script=added["script"])

    def screenshot(self, file: Path, scheme: str) -> None:
        self.prefer(scheme)
        shot = self.ask("browsingContext.captureScreenshot", context=self.tab, origin="document")
        file.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def plain(value: dict[str, Any]) -> Any:
    """Return a value of JavaScript, as BiDi describes it, as one of Python."""
    kind, inside = value["type"], value.get("value")
    if kind == "array":
        return [plain(each) for each in inside]
    if kind == "object":
        return {key: plain(each) for key, each in inside}
    return inside

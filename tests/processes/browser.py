"""A headless Chromium, driven by its own protocol (chromedevtools.github.io/devtools-protocol).

Through `websockets`, which LiteLLM's proxy brings along, so that the tests need no further package. Where there is no
Chromium, they are skipped.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
from websockets.sync.client import ClientConnection, connect

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Bounds a hang: on a busy machine a page has taken two minutes.
_LIMIT_S = 400.0
# Every 20 ms.
_MOST_LOOKS = 6000
_OPTIONS = (
    *("--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars", "--remote-debugging-port=0"),
    *("--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-lcd-text"),
)


def chromium() -> str | None:
    """The browser of this machine: `$CHROMIUM`, else the first on PATH."""
    named = os.environ.get("CHROMIUM")
    return named or next((found for name in _NAMES if (found := shutil.which(name))), None)


@dataclass
class Browser:
    """One tab, and what the browser complained about in it."""

    socket: ClientConnection
    _number: int = 0
    _loaded: int = 0
    complaints: list[str] = field(default_factory=list)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command."""
        self._number += 1
        number = self._number
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = self._next()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result

    def view(self, width: int, height: int, scheme: Literal["light", "dark"] = "light") -> None:
        """Sets the size in CSS pixels, and the color scheme; times are in UTC."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setTimezoneOverride", timezoneId="UTC")

    def open(self, url: str) -> None:
        """Goes to an address."""
        with self.loading():
            self.call("Page.navigate", url=url)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Ends when the page that the block has asked for is there."""
        seen = self._loaded
        yield
        until_s = time.monotonic() + _LIMIT_S
        while self._loaded == seen:
            assert time.monotonic() < until_s, "the page did not come"
            self._next()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self) -> str:
        """What somebody reads."""
        return str(self.evaluate("document.body.innerText"))

    def fill(self, selector: str, value: str) -> None:
        """Puts a value into a control."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).value = {json.dumps(value)}")

    def click(self, selector: str) -> None:
        """Presses what is there to be pressed: nothing lies over its middle."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.until(found)
        # In one step: what is drawn meanwhile would move it away from under a mouse.
        self.evaluate(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();"
            " const over = document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2);"
            f" if (!e.contains(over)) throw new Error('covered'); e.click(); }})({found})"
        )

    def press(self, key: str) -> None:
        """Presses a key where the focus is: Enter, Tab, or one that writes itself."""
        text = {"Enter": "\r", "Tab": ""}.get(key, key)
        code = {"Enter": 13, "Tab": 9}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text, windowsVirtualKeyCode=code)

    def until(self, expression: str) -> None:
        """Returns when an expression is true: the page's script has made it so, within two minutes."""
        watched = (
            "new Promise(done => { let looks = 0; const look = () => {"
            f" try {{ if ({expression}) return done(true); }} catch {{}}"
            f" if (++looks > {_MOST_LOOKS}) return done(false); setTimeout(look, 20); }}; look(); }})"
        )
        answer = self.call("Runtime.evaluate", expression=watched, awaitPromise=True, returnByValue=True)
        assert answer["result"].get("value") is True, f"{expression} is not so in:\n{self.text()}"

    def reads(self, words: str) -> None:
        """Returns when these words stand in the page."""
        self.until(f"document.body.innerText.includes({json.dumps(words)})")

    def screenshot(self, path: Path) -> None:
        """Writes a PNG of what is seen."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _next(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.socket.recv(timeout=_LIMIT_S))
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded += 1
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded":
            self.complaints.append(f"{params['entry']['source']}: {params['entry']['text']}")
        return message


@contextmanager
def browse(executable: str, profile: Path) -> Iterator[Browser]:
    """A Chromium whose profile is an empty folder, ended with all that it started."""
    process = subprocess.Popen(
        [executable, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )
    try:
        port = _port(process, profile / "DevToolsActivePort")
        with httpx.Client(trust_env=False, timeout=_LIMIT_S) as client:
            tabs = client.get(f"http://127.0.0.1:{port}/json/list").json()
        address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        with connect(address, max_size=None, proxy=None) as socket:
            browser = Browser(socket)
            for domain in ("Page", "Runtime", "Log"):
                browser.call(f"{domain}.enable")
            yield browser
            browser.call("Browser.close")
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def _port(process: subprocess.Popen[bytes], path: Path) -> int:
    until_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < until_s:
        if path.exists() and (lines := path.read_text().splitlines()):
            return int(lines[0])
        assert process.poll() is None, "the browser ended instead of starting"
        # Another process writes the file: there is nothing to wait for but the next look.
        time.sleep(0.05)
    raise AssertionError("the browser did not start in time")

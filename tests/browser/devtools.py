"""A page in headless Chromium, driven over the DevTools protocol: clicks and keys as a reader gives them."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

BINARIES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60  # seconds that a browser on a busy machine may take for one answer
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-port=0", "--remote-allow-origins=*",
)  # fmt: skip
KEYS = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def binary() -> str | None:
    return next(filter(None, map(shutil.which, BINARIES)), None)


class Browser:
    """One tab. `errors` and `requests` hold what the page said and asked for since it was opened."""

    def __init__(self, address: str) -> None:
        self.socket = websocket.create_connection(address, timeout=PATIENCE)
        self.numbers = itertools.count(1)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, hear events until its answer."""
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (message := json.loads(self.socket.recv())).get("id") != number:
            self._hear(message["method"], message["params"])
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

    def _hear(self, event: str, said: dict[str, Any]) -> None:
        match event:
            case "Runtime.exceptionThrown":
                self.errors.append(said["exceptionDetails"]["text"])
            case "Runtime.consoleAPICalled" if said["type"] in ("error", "warning", "assert"):
                self.errors.append(str(said["args"]))
            case "Log.entryAdded" if said["entry"]["level"] in ("error", "warning"):
                self.errors.append(said["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(said["request"]["url"])
            case "Page.loadEventFired":
                self.loaded = True

    def open(self, path: Path) -> None:
        self.loaded, self.errors, self.requests = False, [], []
        self.call("Page.navigate", url=path.as_uri())
        while not self.loaded:
            message = json.loads(self.socket.recv())
            self._hear(message["method"], message["params"])
        self.ask("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")

    def ask(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def look(self, width: int = 1280, scheme: str = "light") -> None:
        """Width of the window in CSS pixels, `light` or `dark`."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def click(self, selector: str, number: int = 0) -> None:
        """The middle of the element, scrolled into view: what lies over it gets the click."""
        x, y = self.ask(
            f"(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{number}];"
            " e.scrollIntoView({block: 'center', inline: 'center'});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, times: int = 1) -> None:
        for _ in range(times):
            for kind in ("rawKeyDown", "char", "keyUp") if key == "Enter" else ("rawKeyDown", "keyUp"):
                text = {"text": "\r"} if kind == "char" else {}
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key], **text)

    def write(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browser(program: str) -> Iterator[Browser]:
    """A browser of its own profile, ended at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen([program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        try:
            tab = Browser(_address(Path(profile) / "DevToolsActivePort", process))
            yield tab
            tab.socket.close()
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _address(file: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the tab listens: the browser writes its port into its profile."""
    from urllib.request import urlopen

    until = time.monotonic() + PATIENCE
    while not (file.exists() and "\n" in file.read_text()):
        assert process.poll() is None and time.monotonic() < until, "the browser did not start"
        time.sleep(0.05)
    with urlopen(f"http://127.0.0.1:{file.read_text().split()[0]}/json") as answer:
        return next(tab["webSocketDebuggerUrl"] for tab in json.load(answer) if tab["type"] == "page")

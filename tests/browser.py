"""A headless Chromium that a test controls over a pipe: it opens pages, records their messages, takes screenshots."""

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

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
_WAIT_S = 300.0


class Page:
    """The only page of a browser, controlled by the Chrome DevTools Protocol: JSON messages separated by zero bytes."""

    def __init__(self, read: int, write: int) -> None:
        self._read = read
        self._write = write
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        # URLs that the page requested, and its warnings and errors.
        self.requests: list[str] = []
        self.errors: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result. Record messages of the page that arrive before the result."""
        self._last_id += 1
        command = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while True:
            message = self._read_message()
            if message.get("id") == self._last_id:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note_event(message)

    def open(self, path: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of this size, and wait until its script reports that everything is drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        end = time.monotonic() + _WAIT_S
        while not self.value("document.documentElement?.dataset.complete || ''"):
            assert time.monotonic() < end, f"not drawn after {_WAIT_S:g} s: {self.errors}"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        evaluation = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in evaluation, evaluation["exceptionDetails"]
        return evaluation["result"].get("value")

    def move_to(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, is_full_page: bool = False) -> None:
        """Write a PNG of the window, or of the full page."""
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=is_full_page)
        path.write_bytes(base64.b64decode(image["data"]))

    def _read_message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            received = os.read(self._read, 1 << 20)
            assert received, "the browser has ended"
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note_event(self, message: dict[str, Any]) -> None:
        """Record a request, a warning or an error of the page."""
        parameters = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.errors.append(str(details.get("exception", {}).get("description") or details["text"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                texts = [str(argument.get("value", argument.get("description"))) for argument in parameters["args"]]
                self.errors.append(" ".join(texts))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.errors.append(parameters["entry"]["text"])


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Run a browser whose new profile is in the folder `profile`."""
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    flags = [
        "--headless=new",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
        "--no-first-run",
        "--disable-gpu",
    ]
    # Chromium's sandbox needs rights that containers lack; the page is the test's own.
    flags += [
        "--no-sandbox",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-dev-shm-usage",
    ]
    command = [
        "bash",
        "-c",
        f'exec "$@" 3<&{to_browser} 4>&{from_browser}',
        "bash",
        str(PROGRAM),
        *flags,
        "about:blank",
    ]
    process = subprocess.Popen(command, pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL)
    os.close(to_browser)
    os.close(from_browser)
    try:
        page = Page(read, write)
        yield page
        page.call("Browser.close")
    finally:
        os.close(read)
        os.close(write)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

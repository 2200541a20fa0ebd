"""A real browser without a window, driven over the WebDriver protocol."""

from __future__ import annotations

import base64
import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvservice.cluster.ports import free_ports
from tests.programs import find
from tests.serving import until


class Browser:
    """One window."""

    def __init__(self, driver: str, session: str) -> None:
        self._base = f"{driver}/session/{session}"

    def open(self, url: str) -> None:
        _ask(f"{self._base}/url", {"url": url})

    def run(self, script: str) -> Any:
        """Return what a function body in JavaScript returns."""
        return _ask(f"{self._base}/execute/sync", {"script": script, "args": []})

    def text(self, selector: str) -> str:
        """Return the text that is seen of an element."""
        return str(self.run(f"return document.querySelector({json.dumps(selector)}).innerText"))

    def resize(self, width: int, height: int) -> None:
        _ask(f"{self._base}/window/rect", {"width": width, "height": height})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(_ask(f"{self._base}/screenshot")))

    def complaints(self) -> list[str]:
        """Return what the browser's console has warned of since the last time."""
        return [line["message"] for line in _ask(f"{self._base}/se/log", {"type": "browser"})]


@contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """Yield a window of a headless Chromium with a profile of its own."""
    port = free_ports("127.0.0.1", 1)[0]
    driver = f"http://127.0.0.1:{port}"
    options = {
        "binary": find("chromium"),
        "args": [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--hide-scrollbars", f"--user-data-dir={folder / 'profile'}"),
        ],
    }
    wanted = {
        "browserName": "chrome",
        "goog:chromeOptions": options,
        "goog:loggingPrefs": {"browser": "WARNING"},
    }
    with subprocess.Popen(
        [find("chromedriver") or "chromedriver", f"--port={port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            until(lambda: _is_ready(driver), 30.0)
            made = _ask(f"{driver}/session", {"capabilities": {"alwaysMatch": wanted}})
            yield Browser(driver, made["sessionId"])
            _ask(f"{driver}/session/{made['sessionId']}", method="DELETE")
        finally:
            process.terminate()


def _ask(url: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from error


def _is_ready(driver: str) -> bool:
    try:
        return bool(_ask(f"{driver}/status")["ready"])
    except OSError:
        return False

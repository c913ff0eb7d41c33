"""A headless Chromium that is asked over its debugging pipe, for all pages one process."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any, Self

OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")
ON_PIPES = 'exec "$0" "$@" 3<&{asked} 4>&{answered}'
"""Chromium hears on descriptor 3 and answers on 4."""
SETTLED_MS = 1200
"""Figures are drawn by then, after a page has loaded."""


class Browser:
    """`with Browser(path) as browser: ...`. Raises RuntimeError for what Chromium refuses."""

    def __init__(self, program: str) -> None:
        self.program = program

    def __enter__(self) -> Self:
        asked, self._ask = os.pipe()
        self._answers, answered = os.pipe()
        self._folder = tempfile.TemporaryDirectory()
        command = ["/bin/bash", "-c", ON_PIPES.format(asked=asked, answered=answered), self.program, *OPTIONS]
        command += [f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=(asked, answered), stderr=subprocess.DEVNULL)
        for end in (asked, answered):
            os.close(end)
        self._numbers, self._rest, self._page = itertools.count(1), b"", ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._page = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._page = ""
            self._call("Browser.close")
        self._process.wait(30)
        for end in (self._ask, self._answers):
            os.close(end)
        self._folder.cleanup()

    def open(self, address: str, width: int, height: int, dark: bool, paper: bool = False) -> None:
        """Show a page on a screen of this size or, with the same width, as it is laid out on paper."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="print" if paper else "", features=[scheme])
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=address)
        self.said("new Promise(done => document.readyState == 'complete' ? done() : addEventListener('load', done))")
        self.said(f"new Promise(done => setTimeout(done, {SETTLED_MS}))")

    def said(self, script: str) -> Any:
        """What an expression comes to in the page, awaited."""
        answer = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script[:80]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def picture(self, width: int, top: int, height: int) -> bytes:
        """A part of the page over its whole width, as a PNG."""
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        return base64.b64decode(self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])

    def printed(self) -> bytes:
        """The page as a PDF, printed from the screen it is shown on."""
        return base64.b64decode(self._call("Page.printToPDF", preferCSSPageSize=True)["data"])

    def _call(self, method: str, **parameters: Any) -> Mapping[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._page:
            message["sessionId"] = self._page
        os.write(self._ask, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: Mapping[str, Any] = answer["result"]
        return result

    def _next(self) -> Mapping[str, Any]:
        """The next message, of Chromium's answers and of what it says by itself."""
        parts = [self._rest]
        while b"\0" not in parts[-1]:
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise RuntimeError(f"{self.program} has ended")
            parts.append(part)
        message, _, self._rest = b"".join(parts).partition(b"\0")
        answer: Mapping[str, Any] = json.loads(message)
        return answer

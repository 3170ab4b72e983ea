"""Drives a real Chromium over its DevTools protocol: https://chromedevtools.github.io/devtools-protocol/."""

import asyncio
import base64
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.harness.until import until_async

__all__ = ["Page", "a_page", "chromium_path"]

_KEYS = {"Tab": 9, "Enter": 13, " ": 32, "Home": 36, "End": 35, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39,
         "ArrowDown": 40, "Escape": 27}  # fmt: skip


def chromium_path() -> str | None:
    """Returns the path of Chromium, or None."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


class Page:
    """One tab of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._session: str | None = None
        self._serial = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        """Exceptions and errors from the page's console."""

    async def open(self) -> None:
        """Opens a new tab."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def pump(self) -> None:
        """Receives messages from the browser until the connection ends."""
        async for message in self._socket:
            reply = json.loads(message.data)
            if (future := self._waiting.pop(reply.get("id"), None)) is not None and not future.done():
                future.set_result(reply)
            elif reply.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(reply["params"]["exceptionDetails"])[:500])
            elif reply.get("method") == "Log.entryAdded" and reply["params"]["entry"]["level"] == "error":
                self.complaints.append(reply["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends one command and returns its result. Raises AssertionError with the browser's error."""
        self._serial += 1
        future = self._waiting[self._serial] = asyncio.get_running_loop().create_future()
        message = {"id": self._serial, "method": method, "params": params}
        await self._socket.send_json(message if self._session is None else {**message, "sessionId": self._session})
        reply = await asyncio.wait_for(future, 30)
        assert "error" not in reply, (method, reply["error"])
        result: dict[str, Any] = reply["result"]
        return result

    async def go(self, url: str) -> None:
        """Loads a page."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def js(self, expression: str) -> Any:
        """Returns the value of an expression, and waits for it if it is a promise."""
        reply = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 15.0) -> Any:
        """Waits until an expression is true, and returns its value."""
        return await until_async(lambda: self.js(expression), expression, within_s=timeout_s, every_s=0.05)

    async def press(self, key: str) -> None:
        """Presses a key as a user would."""
        code = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": _KEYS[key]}
        text = {"Enter": "\r", " ": " "}.get(key)
        await self.call("Input.dispatchKeyEvent", type="keyDown", **code, **({"text": text} if text else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    async def type(self, text: str) -> None:
        """Types characters into the element that has the focus."""
        await self.call("Input.insertText", text=text)

    async def prefer(self, scheme: str) -> None:
        """Sets the colour scheme of the system: `light` or `dark`."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def size(self, width: int, height: int) -> None:
        """Sets the size of the window in pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def picture(self, path: Path, clip: tuple[int, int] | None = None) -> None:
        """Writes the whole page as PNG, or only its first `clip` pixels (width, height)."""
        area = {} if clip is None else {"clip": {"x": 0, "y": 0, "width": clip[0], "height": clip[1], "scale": 1}}
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, **area)
        path.write_bytes(base64.b64decode(answer["data"]))


@asynccontextmanager
async def a_page(chromium: str, scratch: Path) -> AsyncIterator[Page]:
    """Yields a tab in a new Chromium, which ends with the context."""
    process = await asyncio.create_subprocess_exec(
        chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--no-proxy-server", "--remote-debugging-port=0", f"--user-data-dir={scratch / 'profile'}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None, "it is a pipe"
    try:
        async with asyncio.timeout(60):
            address = b""
            while not address:
                line = await process.stderr.readline()
                assert line, "Chromium ended at its start"
                if line.startswith(b"DevTools listening on "):
                    address = line.split()[-1]
        drain = asyncio.create_task(process.stderr.read())
        async with aiohttp.ClientSession() as session, session.ws_connect(address.decode(), max_msg_size=0) as socket:
            page = Page(socket)
            pump = asyncio.create_task(page.pump())
            try:
                await page.open()
                yield page
            finally:
                pump.cancel()
                await asyncio.gather(pump, return_exceptions=True)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await asyncio.gather(drain, return_exceptions=True)

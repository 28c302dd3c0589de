"""A page in headless Chromium, driven by the DevTools protocol over its websocket.

async with browser(folder) as page:        a new profile each time, ended at the end
    await page.goto(url)
    await page.until("document.querySelector('h1')")
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START_S, ANSWER_S, UNTIL_S = 60.0, 60.0, 90.0
# no GPU, no sandbox for root, and nothing that asks the network by itself
FLAGS = (
    "--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1280,1000",
)  # fmt: skip


class Page:
    """`requests`: addresses asked for; `complaints`: errors of scripts, and what the content security policy
    has refused."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._asked = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._answer: Callable[[str], object] = dict
        self._giving: set[asyncio.Future[None]] = set()
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._waiting.pop(said["id"]).set_result(said)
            else:
                self._note(said["method"], said["params"])

    def _note(self, method: str, said: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif method == "Fetch.requestPaused":
            self._giving.add(asyncio.ensure_future(self._give(said["requestId"], said["request"]["url"])))
        elif method == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and said["entry"]["source"] == "security":
            self.complaints.append(said["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning"):
            self.complaints.append(str([each.get("value", each.get("description")) for each in said["args"]]))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._asked += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[self._asked] = answer
        await self._socket.send_str(json.dumps({"id": self._asked, "method": method, "params": parameters}))
        said = await asyncio.wait_for(answer, ANSWER_S)
        if method == "Runtime.evaluate" and "error" in said:  # the page is just being left
            return {"result": {"value": None}}
        assert "error" not in said, (method, said)
        return dict(said["result"])

    async def js(self, code: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        said = await self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def until(self, code: str, limit_s: float = UNTIL_S) -> Any:
        """The first value of the expression that is true; of a node: true."""
        code = f"((value) => value instanceof Node || value)({code})"
        try:
            async with asyncio.timeout(limit_s):
                while not (value := await self.js(code)):
                    await asyncio.sleep(0.1)
                return value
        except TimeoutError:
            shown = await self.js("document.body.innerText")
            raise AssertionError(
                f"{limit_s:g} s are over, and not: {code}\n{shown}\n{self.complaints}"
            ) from None

    async def goto(self, url: str) -> None:
        """Also to another part of the same page."""
        await self.call("Page.navigate", url=url)

    async def reload(self) -> None:
        """Returns once the page is another one."""
        await self.js("window.before_ = true")
        await self.call("Page.reload")
        await self.until("!window.before_ && document.querySelector('main')")

    async def press(self, key: str, text: str = "") -> None:
        """A key, as its name in KeyboardEvent."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}.get(key, 0)
        said = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call(
            "Input.dispatchKeyEvent",
            type="keyDown",
            text=text or {"Enter": "\r", " ": " "}.get(key, ""),
            **said,
        )
        await self.call("Input.dispatchKeyEvent", type="keyUp", **said)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def mouse(self, kind: str, x: float, y: float) -> None:
        """mouseMoved, mousePressed or mouseReleased, with the left button."""
        pressed = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    @asynccontextmanager
    async def answering(self, pattern: str, answer: Callable[[str], object]) -> AsyncIterator[None]:
        """Requests for such addresses do not leave the browser: `answer(url)` is given to the page, as
        JSON."""
        self._answer = answer
        await self.call("Fetch.enable", patterns=[{"urlPattern": pattern}])
        try:
            yield
        finally:
            await self.call("Fetch.disable")

    async def _give(self, request_id: str, url: str) -> None:
        body = base64.b64encode(json.dumps(self._answer(url)).encode()).decode()
        headers = [{"name": "Content-Type", "value": "application/json"}]
        await self.call(
            "Fetch.fulfillRequest", requestId=request_id, responseCode=200, responseHeaders=headers, body=body
        )

    async def dark(self, *, on: bool) -> None:
        value = "dark" if on else "light"
        await self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}]
        )

    async def width(self, pixels: int) -> None:
        """Of the window."""
        size: dict[str, Any] = {"width": pixels, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def picture(self, file: Path) -> None:
        """The whole page, as PNG."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        made = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(made["data"]))


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """`folder`: for its profile and what it prints."""
    assert CHROMIUM is not None, "Chromium is not installed"
    profile = folder / "chromium"
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with (folder / "chromium.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *FLAGS, *sandbox, f"--user-data-dir={profile}", "about:blank",
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        port = await _port_in(profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                target = next(each for each in await answer.json() if each["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                listening = asyncio.ensure_future(page.listen())
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{domain}.enable")
                yield page
                with contextlib.suppress(Exception):
                    await page.call("Browser.close")
                listening.cancel()
    finally:
        if process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 5)
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _port_in(file: Path) -> int:
    async with asyncio.timeout(START_S):
        while not file.exists() or len(file.read_text().split()) < 2:
            await asyncio.sleep(0.05)
        return int(file.read_text().split()[0])

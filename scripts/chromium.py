"""A headless Chromium that a script or a test drives, over the protocol of its developer tools."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

PATIENCE_S = 60.0
"""Seconds that one command, or a condition in a page, may take on a busy machine."""
FLAGS = (
    *("--headless=new", "--no-first-run", "--no-default-browser-check", "--disable-extensions", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0", "--force-device-scale-factor=1"),
)

KEY_CODES = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def path_of_chromium() -> str | None:
    """Return the path of Chromium or Chrome, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Tab:
    """One page in Chromium.

    Attributes:
        requests: Addresses of all requests that the page has made, its own document included.
        messages: Errors and warnings of the page's console, and exceptions that no code caught.
    """

    def __init__(self, send: Callable[..., Any], session: str) -> None:
        self.requests: list[str] = []
        self.messages: list[str] = []
        self.session = session
        self._send = send

    async def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol for this page."""
        return await self._send(method, parameters, self.session)

    async def open(self, address: str, width: int = 1280, height: int = 800, *, is_dark: bool = False) -> None:
        """Go to an address in a window of this size."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.call("Page.navigate", url=address)

    async def run(self, code: str) -> Any:
        """Return the value of an expression in the page. A promise is awaited.

        Raises:
            RuntimeError: It raised.
        """
        done = await self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(json.dumps(done["exceptionDetails"])[:2_000])
        return done["result"].get("value")

    async def until(self, code: str) -> Any:
        """Return the value of an expression once it is true. The policy of a page forbids it to poll by itself.

        Raises:
            TimeoutError: It is not true in time.
        """
        async with asyncio.timeout(PATIENCE_S):
            while not (value := await self.run(code)):
                await asyncio.sleep(0.02)
        return value

    async def press(self, *keys: str) -> None:
        """Press keys, one after the other: characters, or names such as `ArrowDown`."""
        for key in keys:
            text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
            virtual = {"windowsVirtualKeyCode": KEY_CODES[key]} if key in KEY_CODES else {}
            await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **virtual)
            await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **virtual)

    async def picture(self, path: Path) -> None:
        """Write a picture of the window as PNG."""
        shot = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    async def heap_bytes(self) -> float:
        """Return the bytes of the page's live objects in JavaScript, after a collection."""
        await self.call("HeapProfiler.collectGarbage")
        metrics = (await self.call("Performance.getMetrics"))["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "JSHeapUsedSize"))


class Chromium:
    """Holds a browser and its connection. `started` makes one."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tabs: dict[str, Tab] = {}

    async def tab(self) -> Tab:
        """Open an empty page in a context of its own, without the storage of any other page."""
        context = await self.send("Target.createBrowserContext", {})
        made = await self.send(
            "Target.createTarget", {"url": "about:blank", "browserContextId": context["browserContextId"]}
        )
        attached = await self.send("Target.attachToTarget", {"targetId": made["targetId"], "flatten": True})
        tab = self._tabs[attached["sessionId"]] = Tab(self.send, attached["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log", "Performance"):
            await tab.call(f"{domain}.enable")
        return tab

    async def send(self, method: str, parameters: dict[str, Any], session: str = "") -> Any:
        """Call a method of the protocol.

        Raises:
            RuntimeError: The browser refuses it.
        """
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        await self._socket.send_json(message)
        async with asyncio.timeout(PATIENCE_S):
            return await future

    async def listen(self) -> None:
        """Take what the browser sends, until the connection ends."""
        async for packet in self._socket:
            message = json.loads(packet.data)
            if "id" in message:
                future = self._waiting.pop(message["id"])
                if not future.done():
                    if "error" in message:
                        future.set_exception(RuntimeError(str(message["error"])))
                    else:
                        future.set_result(message["result"])
            elif tab := self._tabs.get(message.get("sessionId", "")):
                self._note(tab, message["method"], message["params"])

    @staticmethod
    def _note(tab: Tab, method: str, told: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            tab.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            tab.messages.append(json.dumps(told["exceptionDetails"])[:1_000])
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            tab.messages.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")


@contextlib.asynccontextmanager
async def started() -> AsyncIterator[Chromium]:
    """Start a browser with a profile of its own, and end it with all its processes.

    Raises:
        FileNotFoundError: There is no Chromium.
    """
    if (program := path_of_chromium()) is None:
        raise FileNotFoundError("chromium")
    with tempfile.TemporaryDirectory(prefix="rlm-broker-chromium-", ignore_cleanup_errors=True) as folder:
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        process = await asyncio.create_subprocess_exec(
            program,
            *FLAGS,
            *root,
            f"--user-data-dir={folder}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port, way = (await _written(Path(folder, "DevToolsActivePort"))).split("\n")[:2]
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(f"ws://127.0.0.1:{port}{way}", max_msg_size=0) as socket,
            ):
                browser = Chromium(socket)
                listening = asyncio.create_task(browser.listen())
                try:
                    yield browser
                finally:
                    with contextlib.suppress(RuntimeError, TimeoutError, ConnectionError, aiohttp.ClientError):
                        await browser.send("Browser.close", {})
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
        finally:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.wait()


async def _written(path: Path) -> str:
    async with asyncio.timeout(PATIENCE_S):
        while not path.exists() or path.read_text().count("\n") < 1:
            await asyncio.sleep(0.02)
    return path.read_text()

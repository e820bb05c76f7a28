"""Headless Chromium on one page through its DevTools protocol: what the page
asked for, said and looks like.

The docs' pictures of a sweep's report are taken by
    python -m tests.browser results/digits-sweep/report.html docs/images
"""

import asyncio
import base64
import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
LOOKS = {
    "report-light": ((1000, 1426), False, "light"),
    "report-dark": ((1000, 1426), False, "dark"),
    "report-phone": ((390, 1150), True, "light"),
}
"""Width and height in CSS pixels, whether it is a phone, and the colour scheme
that the reader prefers.
"""


@dataclass
class Page:
    """What came of opening a page."""

    asked: list[str] = field(default_factory=list)
    """Addresses that it asked for, itself left out."""
    said: list[str] = field(default_factory=list)
    """Console messages, errors of scripts, and what its security policy refused."""
    pictures: dict[str, bytes] = field(default_factory=dict)
    """PNG files."""
    found: dict[str, Any] = field(default_factory=dict)
    """The values of JavaScript expressions, by look and expression."""


def chromium() -> str | None:
    """The browser of this machine."""
    return next(
        (found for name in PROGRAMS if (found := shutil.which(name))), None
    )


def look_at(
    file: Path, *expressions: str, looks: dict[str, Any] | None = None
) -> Page:
    """Open a file in each of the looks, in a browser that knows no name but
    127.0.0.1; evaluate expressions.
    """
    import psutil

    program = chromium()
    assert program is not None
    with tempfile.TemporaryDirectory() as profile:
        # fmt: off
        browser = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
             "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
             "--disable-background-networking", "--no-first-run", "--force-color-profile=srgb",
             "--remote-allow-origins=*", f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )
        # fmt: on
        try:
            return asyncio.run(
                asyncio.wait_for(
                    _visit(Path(profile), file, expressions, looks or LOOKS),
                    120,
                )
            )
        finally:
            # Its processes write to the profile for as long as they live.
            family = [
                *psutil.Process(browser.pid).children(recursive=True),
                psutil.Process(browser.pid),
            ]
            browser.terminate()
            _, alive = psutil.wait_procs(family, timeout=10)
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            browser.wait()
            psutil.wait_procs(alive)


async def _visit(
    profile: Path,
    file: Path,
    expressions: tuple[str, ...],
    looks: dict[str, Any],
) -> Page:
    import aiohttp

    port_file = profile / "DevToolsActivePort"
    while not port_file.exists() or "\n" not in port_file.read_text():
        await asyncio.sleep(0.05)
    port = port_file.read_text().split()[0]
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            targets = await answer.json()
        socket_address = next(
            target["webSocketDebuggerUrl"]
            for target in targets
            if target["type"] == "page"
        )
        async with session.ws_connect(
            socket_address, max_msg_size=0
        ) as socket:
            tab = _Tab(socket, Page(), file.resolve().as_uri())
            for domain in ("Page", "Network", "Runtime", "Log"):
                await tab.call(f"{domain}.enable")
            offline = {
                "offline": True,
                "latency": 0,
                "downloadThroughput": 0,
                "uploadThroughput": 0,
            }
            await tab.call("Network.emulateNetworkConditions", **offline)
            for name, ((width, height), mobile, scheme) in looks.items():
                scheme_wish = [
                    {"name": "prefers-color-scheme", "value": scheme}
                ]
                metrics = {
                    "width": width,
                    "height": height,
                    "deviceScaleFactor": 2 if mobile else 1,
                    "mobile": mobile,
                }
                await tab.call(
                    "Emulation.setEmulatedMedia", features=scheme_wish
                )
                await tab.call("Emulation.setDeviceMetricsOverride", **metrics)
                await tab.open()
                await tab.note(name, expressions)
            return tab.page


class _Tab:
    """One tab: commands and their answers; what happens between them goes into
    the page.
    """

    def __init__(self, socket: Any, page: Page, address: str):
        self.page = page
        self._socket = socket
        self._address = address
        self._number = 0
        self._loaded = False

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; its result."""
        self._number += 1
        await self._socket.send_json(
            {"id": self._number, "method": method, "params": params}
        )
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message)

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def note(self, name: str, expressions: Sequence[str]):
        """Take down the values of expressions, and a picture."""
        for expression in expressions:
            self.page.found[f"{name}: {expression}"] = await self.value(
                expression
            )
        picture = await self.call(
            "Page.captureScreenshot", format="png", optimizeForSpeed=False
        )
        self.page.pictures[name] = base64.b64decode(picture["data"])

    async def open(self):
        """Load the page, to its end."""
        self._loaded = False
        await self.call("Page.navigate", url=self._address)
        while not self._loaded:
            self._note(await self._socket.receive_json())

    def _note(self, message: dict[str, Any]):
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                address = params["request"]["url"]
                if address != self._address and not address.startswith(
                    "data:"
                ):
                    self.page.asked.append(address)
            case "Runtime.consoleAPICalled":
                self.page.said.append(
                    f"console.{params['type']}: {params['args']}"
                )
            case "Runtime.exceptionThrown":
                self.page.said.append(str(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.page.said.append(str(params["entry"]))


def main(report: str, directory: str):
    """Write the pictures, in few colours: small files."""
    from PIL import Image

    page = look_at(Path(report))
    for name, picture in page.pictures.items():
        file = Path(directory) / f"{name}.png"
        Image.open(io.BytesIO(picture)).convert("RGB").quantize(96).save(
            file, optimize=True
        )
        print(f"{file}  {file.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(*sys.argv[1:])

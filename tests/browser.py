"""A real Chromium, driven by Playwright: one for all tests, one tab for most of them.

Playwright keeps every tab in the belief that it is in front. Where a tab has to be hidden in
earnest, a `Window` drives another Chromium by the DevTools protocol itself.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from serving import PATIENCE_S, Running

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# Runs in the page before its own script.
WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", event =>
  violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}`));
"""


class Tab:
    """The page in a tab. What it should not do is written down, and looked at when it closes."""

    def __init__(self, page: Any, origin: str) -> None:
        self.page = page
        self.origin = origin
        self.errors: list[str] = []
        self.addresses: list[str] = []
        self.listeners = {
            "pageerror": lambda error: self.errors.append(str(error)),
            "console": self._console,
            "request": lambda request: self.addresses.append(request.url),
            "websocket": lambda socket: self.addresses.append(socket.url),
        }
        for event, listener in self.listeners.items():
            page.on(event, listener)

    def _console(self, message: Any) -> None:
        # What the browser itself says of a refused or broken request is no error of the page.
        network = ("Failed to load resource", "WebSocket connection to", "EventSource's response")
        if message.type in ("error", "warning") and not message.text.startswith(network):
            self.errors.append(message.text)

    async def do(self, script: str, argument: Any = None) -> Any:
        """What an expression, or a function of `argument`, evaluates to in the page."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.page.evaluate(script, argument)

    async def until(self, condition: str, argument: Any = None) -> None:
        """Wait until an expression holds in the page."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self.page.evaluate(condition, argument):
                await asyncio.sleep(0.01)

    async def leave(self) -> None:
        """Let the next test have the tab."""
        for other in self.page.context.pages:
            if other is not self.page:
                await other.close()
        if self.page.is_closed():
            return
        for event, listener in self.listeners.items():
            self.page.remove_listener(event, listener)
        await self.page.unroute_all()
        await self.page.goto("about:blank")

    async def check(self) -> None:
        """No errors, nothing that tripped the policy, no address but the server's."""
        assert self.errors == []
        if not self.page.is_closed():
            assert await self.page.evaluate("violations") == []
        host = self.origin.partition("//")[2]
        elsewhere = [a for a in self.addresses if a.partition("//")[2].partition("/")[0] != host]
        assert [a for a in elsewhere if not a.startswith("data:")] == []


@asynccontextmanager
async def opened(chromium: Any, running: Running, **options: Any) -> AsyncIterator[Tab]:
    """The server's page in a tab.

    With options (`Browser.new_context`) it has a profile of its own. Without, it is the tab of the
    test before, which is quicker; a server's port is another origin, so nothing is left of it.
    """
    if options or not chromium.contexts:
        context = await chromium.new_context(**options)
        await context.add_init_script(WATCH)
    else:
        (context,) = chromium.contexts
    page = context.pages[0] if context.pages else await context.new_page()
    tab = Tab(page, f"http://127.0.0.1:{running.port}")
    try:
        await page.goto(tab.origin)
        await tab.do("ready")
        yield tab
        await tab.check()
    finally:
        await (context.close() if options else tab.leave())


class Window:
    """A browser with one tab in front, spoken to by the Chrome DevTools Protocol."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.calls = 0

    async def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        self.calls += 1
        call = {"id": self.calls, "method": method, "params": params}
        await self.socket.send(json.dumps(call | ({"sessionId": session} if session else {})))
        async with asyncio.timeout(PATIENCE_S):
            while (answer := json.loads(await self.socket.recv())).get("id") != self.calls:
                pass  # an event
        assert "error" not in answer, answer
        return answer["result"]

    async def open(self, url: str) -> tuple[str, str]:
        """A new tab in front of the others: its target and its session."""
        target = (await self.call("Target.createTarget", url=url))["targetId"]
        attached = await self.call("Target.attachToTarget", targetId=target, flatten=True)
        return target, attached["sessionId"]

    async def do(self, session: str, script: str) -> Any:
        told = await self.call(
            "Runtime.evaluate", session, expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, session: str, condition: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await self.do(session, f"Boolean({condition})"):
                await asyncio.sleep(0.02)


@asynccontextmanager
async def window(program: str, folder: Path) -> AsyncIterator[Window]:
    """A Chromium of one's own, its profile in this folder."""
    from websockets.asyncio.client import connect

    command = [program, "--headless", *FLAGS, f"--user-data-dir={folder}"]
    process = await asyncio.create_subprocess_exec(
        *command, "--remote-debugging-port=0", stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not (told := re.search(rb"ws://[!-~]+", await process.stderr.readline())):
                pass
        async with connect(told[0].decode(), max_size=None, proxy=None) as socket:
            window = Window(socket)
            yield window
            await window.call("Browser.close")
            async with asyncio.timeout(PATIENCE_S):
                await process.stderr.read()
                await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

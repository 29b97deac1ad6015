"""A real Chromium, driven by Playwright: one for all tests, a profile of its own for each."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from serving import Running

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
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._console)
        page.on("request", lambda request: self.addresses.append(request.url))
        page.on("websocket", lambda socket: self.addresses.append(socket.url))

    def _console(self, message: Any) -> None:
        # What the browser itself says of a refused or broken request is no error of the page.
        network = ("Failed to load resource", "WebSocket connection to")
        if message.type in ("error", "warning") and not message.text.startswith(network):
            self.errors.append(message.text)

    async def do(self, script: str, argument: Any = None) -> Any:
        """What an expression, or a function of `argument`, evaluates to in the page."""
        async with asyncio.timeout(60):
            return await self.page.evaluate(script, argument)

    async def until(self, condition: str, argument: Any = None) -> None:
        """Wait until an expression holds in the page."""
        async with asyncio.timeout(30):
            while not await self.page.evaluate(condition, argument):
                await asyncio.sleep(0.01)

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
    """The server's page in a tab of its own profile, with these options (`Browser.new_context`)."""
    context = await chromium.new_context(**options)
    try:
        await context.add_init_script(WATCH)
        tab = Tab(await context.new_page(), f"http://127.0.0.1:{running.port}")
        await tab.page.goto(tab.origin)
        await tab.do("ready")
        yield tab
        await tab.check()
    finally:
        await context.close()

"""The real `server.py` in a process of its own, with the simulated model."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from serving import Peer, connected

SERVER = Path(__file__).resolve().parent.parent / "server.py"
# Warnings are errors, and asyncio's debug mode is on: what either has to say goes to stderr.
STRICT = ("-X", "dev", "-W", "error")


async def start(*arguments: str, python: str = sys.executable) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        python, *STRICT, str(SERVER), "--model", "simulated", *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def outcome(process: asyncio.subprocess.Process) -> tuple[int | None, bytes, bytes]:
    """Exit code, rest of stdout, stderr; within a time in which nothing may hang."""
    async with asyncio.timeout(20):
        out, err = await process.communicate()
    return process.returncode, out, err


class Program:
    """A server process that is ready."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url
        self.port = int(url.rpartition(":")[2])

    def connect(self, receive_buffer: int | None = None) -> AbstractAsyncContextManager[Peer]:
        return connected(self.port, receive_buffer)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@asynccontextmanager
async def started(*arguments: str, python: str = sys.executable) -> AsyncIterator[Program]:
    """A server for as long as the block lasts, on a free port unless one is given."""
    port = () if "--port" in arguments else ("--port", "0")
    process = await start(*port, *arguments, python=python)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            line = (await process.stdout.readline()).decode()
        assert re.fullmatch(r"https?://127\.0\.0\.1:[0-9]+\n", line), line
        yield Program(process, line.strip())
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()

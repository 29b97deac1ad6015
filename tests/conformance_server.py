"""The project's own connection loop behind three services that test programs ask for.

    python tests/conformance_server.py [--port N]        prints the port

`/conf-echo` answers GET and POST with the request's content; `/ws-echo` is a WebSocket that echoes
every message; `/sse-cases/N` sends case N of `sse_cases.json` as an event stream, one write a byte
with `?bytewise=1`. Limits are the server's own, but for deadlines below 8 s, and messages of 16 MiB
with room to queue their echoes.
"""

import argparse
import asyncio
import base64
import contextlib
import functools
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import http1  # noqa: E402
import server  # noqa: E402
from connection import Connection, Exchange, error_body  # noqa: E402
from duplex import Duplex  # noqa: E402
from watching import Settings, WatchedReader  # noqa: E402

SSE_CASES = ROOT.parent / "shared" / "checks" / "sse_cases.json"
MESSAGE_BYTES = 16 * 1024 * 1024
SETTINGS = Settings(head_s=4, content_s=4, idle_s=6, queued_bytes=2 * MESSAGE_BYTES)


async def echo(exchange: Exchange) -> None:
    content = await exchange.content()
    exchange.respond(200, content, "application/octet-stream")


async def websocket_echo(exchange: Exchange) -> None:
    duplex = Duplex(exchange, max_message_bytes=MESSAGE_BYTES)
    await duplex.accept()
    exchange.heartbeat = b""
    while (message := await duplex.receive()) is not None:
        duplex.send(message)
        await exchange.drained()


@functools.cache
def sse_cases() -> list[bytes]:
    return [base64.b64decode(case["input_base64"]) for case in json.loads(SSE_CASES.read_bytes())]


async def sse_case(exchange: Exchange) -> None:
    number = exchange.request.path.rpartition("/")[2]
    cases = sse_cases()
    if not (number.isascii() and number.isdigit() and int(number) < len(cases)):
        raise http1.ProtocolError("no such case", 404)
    exchange.start(200, server.STREAM_FIELDS)
    raw = cases[int(number)]
    bytewise = ("bytewise", "1") in exchange.request.query
    for part in [raw[i : i + 1] for i in range(len(raw))] if bytewise else [raw]:
        exchange.write(exchange.frame(part))
        await asyncio.sleep(0)
    exchange.finish()


SERVICES = {
    "/conf-echo": ({"GET", "HEAD", "POST", "OPTIONS"}, echo),
    "/ws-echo": ({"GET"}, websocket_echo),
}


async def handle(exchange: Exchange) -> None:
    try:
        await answer(exchange)
    except http1.ProtocolError as error:
        fields = server.websocket.UPGRADE_REQUIRED_FIELDS if error.status == 426 else ()
        body = error_body(str(error), "invalid_request_error")
        exchange.respond(error.status, body, "application/json", fields)


async def answer(exchange: Exchange) -> None:
    request = exchange.request
    if request.expects_other:
        raise http1.ProtocolError("only 100-continue can be expected", 417)
    if request.target == "*":
        exchange.respond_empty(204)
    elif request.path.startswith("/sse-cases/"):
        await sse_case(exchange)
    elif request.path not in SERVICES:
        raise http1.ProtocolError("not found", 404)
    else:
        methods, service = SERVICES[request.path]
        if request.method not in methods:
            allow = [("Allow", ", ".join(sorted(methods)))]
            exchange.respond(405, error_body("no", "x"), "application/json", allow)
        else:
            await service(exchange)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    listener = server.bind("127.0.0.1", parser.parse_args().port)
    loop = asyncio.get_running_loop()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Connection(reader, writer, handle, SETTINGS).run()

    def protocol() -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(WatchedReader(loop=loop), accept, loop=loop)

    await loop.create_server(protocol, sock=listener, backlog=256)
    print(listener.getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())

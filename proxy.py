"""A gateway that buffers on purpose, and can be told not to: why a stream arrives in one burst.

Most streams on the web pass a gateway (nginx, a load balancer, a provider's front door), and many
gateways collect a response's content in blocks before they send it on: fewer system calls, fewer
packets, and an upstream that is done early. For a token stream it undoes streaming: nothing is
seen until the first block is full, then a lump of text, then nothing again.

    upstream    head "Two" " plus" " two" ...                     8192nd byte          end
    buffering   |---------------- nothing ------------------------| head + block  ---- | the rest
    honored     head "Two" " plus" " two" ...

nginx lets a response switch this off for itself with the field `X-Accel-Buffering: no`; so does
this gateway with `--honor`. Name and value are compared without case, as nginx does; the field is
forwarded unchanged (nginx would hide it).

Content that upstream breaks off is never ended properly: what was held is sent, then the
connection closes without a last chunk or short of its length. Where the end of the connection
would be the end of the content, the connection is reset, which may overtake the last bytes.

Who left?  A client that closes its connection sends the same FIN as one that only sends no more
(`printf ... | nc` does) and reads on. Only writing tells: a socket that is gone answers with a
reset. While buffering, nothing is written, so at end-of-file the gateway writes something
harmless, a probe. Where there is none (an HTTP/1.0 client before the head), whatever upstream
sends within PROBE_S is the probe, and silence means gone. A client that sends far ahead is not
read to its end: Linux tells of a FIN behind unread bytes, and a probe now and then of one that
could not even be sent. Upstream is closed at once when the client is gone; a half-close is not
passed on, since most servers take it for a departure.

Covered: RFC 9110 section 10.1.1 (Expect); RFC 9112 sections 8 (incomplete messages), 9
(connections), 9.6 (closing in two steps).

Not here: what is written to each side (`forwarding.py`, the file to read before this one); a
persistent connection to upstream (a new one for each request: nothing of one client's can reach
another), trailers (dropped, as RFC 9110 section 6.5.1 allows), upgrades other than WebSocket (the
field is removed, which declines it), CONNECT and TRACE at the last hop (501), caching, TLS,
several upstreams.

Read next: `figures.py`.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import struct
import sys
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from socket import SO_ERROR, SO_LINGER, SOL_SOCKET
from typing import Any
from urllib.parse import urlsplit

import http1
from forwarding import ClientGone, Downstream, asks_websocket, authority, hops_left, request_head
from watching import ends_unread, limit_silence

READ_BYTES = 64 * 1024
PIPELINE_BYTES = 64 * 1024  # read ahead of the reply under way; then TCP holds the client back
HEAD_S = 10.0  # a head that was begun has to be complete by then (408)
IDLE_S = 75.0  # between two requests; browsers give up after about as long
CONTENT_S = 30.0  # between two parts of a request's content (408)
CONNECT_S = 10.0
LINGER_S = 2.0  # RFC 9112 section 9.6
PROBE_S = 0.25  # between two probes of a client that half-closed
AHEAD_PROBE_S = 5.0  # and of one whose end can't be seen behind what it has sent
LIMITS = http1.Limits(content_bytes=None)  # streamed, never held: upstream knows its own limit

ERROR_TYPES = {501: "not_implemented", 502: "bad_gateway", 504: "gateway_timeout"}


@dataclass(frozen=True, slots=True)
class Settings:
    """Where upstream is and how its responses are passed on."""

    upstream: tuple[str, int]
    honor: bool = False
    block_bytes: int = 8192
    timeout_s: float = 300.0  # of silence: a long prompt may take minutes to its first token
    stall_s: float = 300.0  # a client that takes or acknowledges nothing for so long is gone


# One request and its response


class Passage:
    """One request forwarded, its response relayed, and the client watched meanwhile."""

    def __init__(self, client: "Connection", request: http1.Request, settings: Settings) -> None:
        self.request = request
        self.downstream = Downstream(client.writer, request, settings.stall_s)
        self._client = client
        self._settings = settings
        self._request_complete = False
        self._parser = http1.ResponseParser()
        self._parser.expect(request.method)
        self._now = asyncio.get_running_loop().time
        self._last_moved = self._now()  # when anything last went to or came from upstream

    async def run(self) -> None:
        """Serve the request. Raises `http1.ProtocolError` with the status to refuse it with."""
        self._reader, self._writer = await self._connect()
        try:
            self._writer.write(request_head(self.request, self._settings.upstream))
            if await first_of(self._relay_response(), self._relay_request()):
                await self._tunnel()
        finally:
            self._writer.transport.abort()  # at once, whatever is still to be written or read

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self._settings.upstream
        try:
            async with asyncio.timeout(min(CONNECT_S, self._settings.timeout_s)):
                reader, writer = await asyncio.open_connection(host, port, limit=READ_BYTES)
        except TimeoutError:
            raise http1.ProtocolError("no connection in time", 504) from None
        except OSError:
            raise http1.ProtocolError("not reachable", 502) from None
        writer.transport.set_write_buffer_limits(0)
        return reader, writer

    # From the client to upstream

    async def _relay_request(self) -> bool:
        """Stream the content up, then watch the client. Ends only by an exception."""
        chunked = "transfer-encoding" in self.request.fields
        # A client that expects a 100 waits for upstream, whose silence is measured elsewhere.
        patience_s = None if self.request.expects_continue else CONTENT_S
        while not isinstance(event := await self._client.next_event(patience_s), http1.End):
            if isinstance(event, http1.Content):
                await self._to_upstream(http1.encode_chunk(event.data) if chunked else event.data)
        if chunked:
            await self._to_upstream(http1.LAST_CHUNK)
        self._request_complete = True
        await self._watch_client()
        raise ClientGone

    async def _to_upstream(self, data: bytes) -> None:
        # An upstream that stopped listening may still answer: RFC 9112 section 9.5.
        with contextlib.suppress(OSError):
            self._writer.write(data)
            await self._writer.drain()
        self._last_moved = self._now()

    async def _watch_client(self) -> None:
        """Return when the client is gone. What else it sends is the next request."""
        ahead_bytes = 0
        while not self._client.eof and ahead_bytes < PIPELINE_BYTES:
            ahead_bytes += await self._client.read()
        probed = self._now()
        while not (self._client.eof or ends_unread(self._client.socket)):
            # So far ahead that its end may not even have been sent: only an answer tells.
            if self._now() - probed >= AHEAD_PROBE_S:
                probed = self._now()
                self.downstream.probe()
            if await self._client.was_reset(within_s=PROBE_S):
                return
        writes_before, waited = self.downstream.writes, False
        while True:
            possible = self.downstream.probe() or self.downstream.writes > writes_before
            if waited and not possible:
                return
            if await self._client.was_reset(within_s=PROBE_S):
                return
            waited = True

    # From upstream to the client

    async def _relay_response(self) -> bool:
        """Relay to the end of the response; True when the protocol was switched."""
        while not isinstance(event := await self._next_event(), http1.End):
            if isinstance(event, http1.Content):
                self.downstream.hold(event.data)
            elif event.status == 101:
                return self._switch(event)
            elif event.interim:
                if self._parser.head_bytes > self._parser.limits.head_bytes:
                    raise http1.ProtocolError("too many interim responses", 502)
                self.downstream.interim(event)
            else:
                self._start(event)
        await self.downstream.end()
        return False

    def _start(self, response: http1.Response) -> None:
        if response.status < 100:
            raise http1.ProtocolError("invalid status code", 502)
        # RFC 9112 section 9.3: a proxy keeps no connection with an HTTP/1.0 client; and where
        # content is still to come, the next request could not be found.
        persists = self.request.keep_alive and self.request.version >= (1, 1)
        keep_alive = persists and self._request_complete
        passed = self._settings.honor and "no" in response.fields.tokens("x-accel-buffering")
        block_bytes = 0 if passed else self._settings.block_bytes
        self.downstream.start(response, self._parser.framing, keep_alive, block_bytes)

    def _switch(self, response: http1.Response) -> bool:
        if not asks_websocket(self.request):
            raise http1.ProtocolError("switched protocols unasked", 502)
        self.downstream.interim(response)
        return True

    async def _next_event(self) -> http1.Response | http1.Content | http1.End:
        """Give upstream's next event; what is due to the client leaves before each read."""
        while (event := self._parser.next_event()) is None:
            await self.downstream.flush()
            data = await self._read_upstream()
            if data:
                self._parser.feed(data)
            else:
                self._parser.feed_eof()
        return event

    async def _read_upstream(self) -> bytes:
        """Read once; time in which the request's content still moves is not silence."""
        self._last_moved = self._now()
        while True:
            deadline = self._last_moved + self._settings.timeout_s
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._reader.read(READ_BYTES)
            except TimeoutError:
                if self._last_moved + self._settings.timeout_s <= deadline:
                    raise http1.ProtocolError("nothing came in time", 504) from None
            except OSError:
                raise http1.Truncated("the connection broke", 502) from None

    # After a 101

    async def _tunnel(self) -> None:
        """Carry bytes both ways until either side closes, and the other had time to follow."""
        client = self._client
        self._writer.write(client.parser.take_unread())
        client.writer.write(self._parser.take_unread())
        pumps = [
            asyncio.create_task(pump(client.reader, self._writer)),
            asyncio.create_task(pump(self._reader, client.writer)),
        ]
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if not any(task.exception() for task in done):  # a half-close, which was passed on
                await asyncio.wait(pumps, timeout=LINGER_S)
        finally:
            await cancel(pumps)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes as they come, and end-of-file when it comes."""
    while data := await reader.read(READ_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def first_of(*coroutines: Coroutine[Any, Any, bool]) -> bool:
    """Run all until one is done; give its result (of several, the earlier argument's)."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        await cancel(tasks)


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel and wait, whatever their results."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# One client's connection


class Connection:
    """The requests of one client, one after the other, each with a connection to upstream."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, settings: Settings
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.parser = http1.RequestParser(LIMITS)
        self.eof = False
        self._settings = settings
        self._downstream: Downstream | None = None
        # `drain` waits until the kernel has everything: a slow client holds upstream back at once.
        writer.transport.set_write_buffer_limits(0)
        self.socket = writer.get_extra_info("socket")
        limit_silence(self.socket, settings.stall_s)

    async def run(self) -> None:
        """Serve until either side has had enough."""
        try:
            while await self._serve_one():
                pass
            await self._linger()
        except (ClientGone, OSError):
            pass
        finally:
            self._close()

    async def read(self) -> int:
        """Feed the parser once; 0 at end-of-file. Raises ClientGone on a reset."""
        try:
            data = await self.reader.read(READ_BYTES)
        except OSError as error:
            raise ClientGone from error
        if data:
            self.parser.feed(data)
        else:
            self.eof = True
            self.parser.feed_eof()
        return len(data)

    async def next_event(
        self, patience_s: float | None
    ) -> http1.Request | http1.Content | http1.End:
        """Give the next event of a request under way."""
        try:
            async with asyncio.timeout(patience_s):
                while (event := self.parser.next_event()) is None:
                    await self.read()
                return event
        except TimeoutError:
            raise http1.ProtocolError("the content took too long to arrive", 408) from None

    async def was_reset(self, within_s: float) -> bool:
        """Ask the socket: asyncio does not poll one whose end-of-file it has read."""
        deadline = time.monotonic() + within_s
        pause_s = 0.001  # the answer to a probe is one round trip away, short or long
        while time.monotonic() < deadline:
            await asyncio.sleep(pause_s)
            pause_s *= 2
            if self.writer.is_closing() or self.socket.getsockopt(SOL_SOCKET, SO_ERROR):
                return True
        return False

    async def _serve_one(self) -> bool:
        """Answer one request; whether another may follow."""
        request = self._downstream = None
        try:
            request = await self._read_head()
            if request is None:
                return False
            if request.method == "OPTIONS" and hops_left(request) == 0:
                await self._answer(request, 200)
                return False
            if request.method == "CONNECT" or hops_left(request) == 0:
                raise http1.ProtocolError(f"{request.method} is not implemented here", 501)
            passage = Passage(self, request, self._settings)
            self._downstream = passage.downstream
            await passage.run()
            return self._downstream.keep_alive
        except http1.ProtocolError as error:
            if self._downstream is not None and self._downstream.started:
                await self._downstream.cut()
            else:
                await self._answer(request, error.status, error)
            return False

    async def _read_head(self) -> http1.Request | None:
        """Wait for a request's head; None when there will be none."""
        now = asyncio.get_running_loop().time
        begun = not self.parser.idle
        try:
            async with asyncio.timeout(HEAD_S if begun else IDLE_S) as deadline:
                while (event := self.parser.next_event()) is None:
                    if self.eof:
                        return None
                    await self.read()
                    if not begun:  # also by an empty line, after which the parser is idle again
                        begun = True
                        deadline.reschedule(now() + HEAD_S)
        except TimeoutError:
            if self.parser.idle:
                return None
            raise http1.ProtocolError("the head took too long to arrive", 408) from None
        return event if isinstance(event, http1.Request) else None

    async def _answer(
        self, request: http1.Request | None, status: int, error: http1.ProtocolError | None = None
    ) -> None:
        """Answer without upstream, as the connection's last answer."""
        fields = [("Date", http1.format_date(time.time())), ("Connection", "close")]
        content = b""
        if error is not None:
            message = f"upstream: {error}" if status in (502, 504) else str(error)
            kind = ERROR_TYPES.get(status, "invalid_request_error")
            content = json.dumps({"error": {"message": message, "type": kind}}).encode()
            fields.append(("Content-Type", "application/json"))
        head_only = request is not None and request.method == "HEAD"
        self.writer.write(http1.encode_response(status, fields, content, head_only=head_only))
        await self.writer.drain()

    async def _linger(self) -> None:
        """Close our half, then read on for a while: RFC 9112 section 9.6.

        Bytes that reach a closed socket are answered with a reset, which may destroy what the
        client has not read yet.
        """
        if self._downstream is not None and self._downstream.needs_reset:
            return
        self.writer.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while await self.reader.read(READ_BYTES):
                    pass

    def _close(self) -> None:
        downstream = self._downstream
        if downstream is not None and downstream.needs_reset and not self.writer.is_closing():
            no_time = struct.pack("ii", 1, 0)  # close() then resets
            self.writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, no_time)
        self.writer.transport.abort()


# The process


async def serve(settings: Settings, host: str, port: int) -> None:
    """Accept clients until a signal comes. Raises OSError when the address can't be had."""
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(Connection(reader, writer, settings).run())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    stop = stop_signal()
    server = await asyncio.start_server(accept, host, port, limit=READ_BYTES)
    print(f"http://{authority(*server.sockets[0].getsockname()[:2])}", flush=True)
    await stop.wait()
    server.close()  # not wait_closed: from Python 3.12 on it waits for every open connection
    await cancel(list(tasks))


def stop_signal() -> asyncio.Event:
    """Give an event that the first SIGINT or SIGTERM sets; the second ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(*_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        loop.call_soon_threadsafe(stop.set)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return stop


def upstream_address(url: str) -> tuple[str, int]:
    """Read `--upstream`: a host and perhaps a port, no path."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise argparse.ArgumentTypeError("must be like http://127.0.0.1:8765")
    return parts.hostname, parts.port or 80


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="A gateway that buffers on purpose.")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=8766, help="0 takes a free one (%(default)s)")
    add(
        "--upstream",
        type=upstream_address,
        default="http://127.0.0.1:8765",
        metavar="URL",
        help="the server behind it (%(default)s)",
    )
    add("--honor", action="store_true", help="let X-Accel-Buffering: no pass at once")
    add("--block", type=int, default=8192, help="bytes held before they are sent (%(default)s)")
    add("--timeout", type=float, default=300, help="seconds of silence until 504 (%(default)s)")
    add("--stall", type=float, default=300, help="seconds a client may take nothing (%(default)s)")
    options = parser.parse_args()
    durations = options.timeout, options.stall
    if options.block < 1 or not all(0 < seconds < float("inf") for seconds in durations):
        parser.error("--block, --timeout and --stall must be above zero")
    return options


def main() -> None:
    """Run the gateway."""
    options = parse_arguments()
    settings = Settings(
        options.upstream, options.honor, options.block, options.timeout, options.stall
    )
    try:
        asyncio.run(serve(settings, options.host, options.port))
    except (OSError, OverflowError) as error:
        address = authority(options.host, options.port)
        sys.exit(f"proxy.py: cannot listen on {address}: {error}")


if __name__ == "__main__":
    main()

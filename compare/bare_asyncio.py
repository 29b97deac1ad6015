"""The limit of asyncio: ready-made events, written straight to its transports, once a tick.

    python compare/bare_asyncio.py --port 0 --delay-ms 20 --tick-ms 4

As `bare.py --tick-ms`, but through what every server on asyncio's streams stands on: one timer a
tick, one `transport.write` an event. No task, no reader, and no word is made.
"""

import asyncio

from bare import BACKLOG, END, EVENT, HEAD, asked, parse_arguments


class Stream(asyncio.Protocol):
    """A client, and how many events are left."""

    transport: asyncio.Transport

    def __init__(self, clock: "Clock") -> None:
        self.left = 0
        self._clock = clock

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Begin, or drop what is no request."""
        count = asked(data)
        if not count or self.left:
            self.transport.close()
            return
        self.left = count
        self.transport.write(HEAD)
        self._clock.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Send no more."""
        self.left = 0


class Clock:
    """Sends an event to each stream every so many ticks."""

    def __init__(self, delay_s: float, tick_s: float) -> None:
        self._delay = round(delay_s / tick_s)  # in ticks
        self._tick_s = tick_s
        self._loop = asyncio.get_running_loop()
        self._due: dict[int, list[Stream]] = {}

    def add(self, stream: Stream) -> None:
        """Begin in the nearest tick."""
        self._streams_of(round(self._loop.time() / self._tick_s) + self._delay).append(stream)

    def _streams_of(self, tick: int) -> list[Stream]:
        if tick not in self._due:
            self._due[tick] = []
            self._loop.call_at(tick * self._tick_s, self._tick, tick)
        return self._due[tick]

    def _tick(self, tick: int) -> None:
        for stream in self._due.pop(tick):
            if stream.left > 1:
                stream.transport.write(EVENT)
                stream.left -= 1
                self._streams_of(tick + self._delay).append(stream)
            elif stream.left:
                stream.transport.write(EVENT + END)
                stream.transport.close()


async def serve(port: int, delay_s: float, tick_s: float) -> None:
    """Accept, and send what is due, for ever."""
    clock = Clock(delay_s, tick_s)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Stream(clock), "127.0.0.1", port, backlog=BACKLOG)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    args = parse_arguments("The limit of asyncio: a bare loop of writes.", tick_ms=1.0)
    asyncio.run(serve(args.port, args.delay_ms / 1000, args.tick_ms / 1000))

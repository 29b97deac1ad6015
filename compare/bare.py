"""The limit: a loop that does nothing but `socket.send` a ready-made event to each of N sockets.

    python compare/bare.py --port 0 --delay-ms 20

The request's `max_tokens` says how many events, everything else about it is ignored: it may come
in one read, and nobody is watched. No framework, no task, no JSON, no buffer: what a server costs
beyond this loop is what it does for its users.

Every stream has the same delay, so the one that waited longest is due first, and a queue is all
the timer there is. With `--tick-ms`, of which the delay has to be a multiple, each stream begins at
the nearest tick, so that it wakes up no oftener than that: waking up can cost as much as several
sends.
"""

import argparse
import re
import selectors
import socket
import time
from collections import deque

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
EVENT = b'1a\r\ndata: {"text": " water"}\n\n\r\n'
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
BACKLOG = 1024


class Stream:
    """A client, when its next event is due, and how many are left."""

    __slots__ = ("due", "left", "peer")

    def __init__(self, peer: socket.socket, due: float, left: int) -> None:
        self.peer = peer
        self.due = due
        self.left = left


def asked(request: bytes) -> int | None:
    """Return how many events a request asks for; None for what is no request."""
    count = re.search(rb'"max_tokens": ?([0-9]{1,9})\b', request)
    return int(count[1]) if count and request.startswith(b"POST /stream ") else None


def begin(peer: socket.socket, delay_s: float, tick_s: float) -> Stream | None:
    """Read a request and write the head; None for what is no request."""
    count = asked(peer.recv(65536))
    due = time.monotonic() + delay_s
    if tick_s:
        due = round(due / tick_s) * tick_s
    if not count:
        peer.close()
        return None
    peer.send(HEAD)
    return Stream(peer, due, count)


def send(stream: Stream, delay_s: float) -> bool:
    """Send one event; False when it was the last, or the client has left."""
    stream.left -= 1
    stream.due += delay_s
    try:
        stream.peer.send(EVENT)
        if stream.left > 0:
            return True
        stream.peer.send(END)
    except OSError:
        pass
    stream.peer.close()
    return False


def serve(listener: socket.socket, delay_s: float, tick_s: float) -> None:
    """Accept, and send what is due, for ever."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    streams: deque[Stream] = deque()
    while True:
        wait = max(0.0, streams[0].due - time.monotonic()) if streams else None
        for key, _ in selector.select(wait):
            if key.fileobj is listener:
                peer, _ = listener.accept()
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(peer, selectors.EVENT_READ)
            else:
                assert isinstance(key.fileobj, socket.socket)
                selector.unregister(key.fileobj)
                if stream := begin(key.fileobj, delay_s, tick_s):
                    streams.append(stream)
        now = time.monotonic()
        while streams and streams[0].due <= now:
            stream = streams.popleft()
            if send(stream, delay_s):
                streams.append(stream)


def parse_arguments(description: str, tick_ms: float) -> argparse.Namespace:
    """Read the flags of both bare servers; only a default of 0 lets there be no ticks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--port", type=int, default=8770)
    parser.add_argument("--delay-ms", type=float, default=33.0)
    parser.add_argument("--tick-ms", type=float, default=tick_ms)
    args = parser.parse_args()
    if args.tick_ms < 0 or (args.tick_ms == 0 and tick_ms > 0):
        parser.error("--tick-ms has to be above 0")
    ticks = args.delay_ms / args.tick_ms if args.tick_ms else 1
    if ticks < 1 or abs(ticks - round(ticks)) > 1e-6:
        parser.error("--delay-ms has to be a multiple of --tick-ms")
    return args


def main() -> None:
    """Serve until interrupted."""
    args = parse_arguments("The limit: a bare loop of sends.", tick_ms=0.0)
    with socket.create_server(("127.0.0.1", args.port), backlog=BACKLOG) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        serve(listener, args.delay_ms / 1000, args.tick_ms / 1000)


if __name__ == "__main__":
    main()

"""The measuring client against servers that write known bytes, and against real ones."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from require import require
from scripted import reset, scripted, until, until_client_ends

import client
import contents
import http1
import roundtrip
import sse
import tally
import websocket
import wire
from client import Failure, Mode, Options, Session, ask

ROOT = Path(__file__).parent.parent
PROMPT = {"prompt": "Hi"}
ASKED = websocket.Message(json.dumps(PROMPT))

HEAD_CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
HEAD_CLOSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CHUNKED = ("Transfer-Encoding", "chunked")
DONE = b"data: [DONE]\n\n"


def event(record, **named):
    return sse.encode(json.dumps(record), **named)


def piece(text):
    return event({"text": text})


def head(status=200, media_type="application/json", length=None, *more):
    fields = [("Content-Type", media_type)] if media_type else []
    if length is not None:
        fields.append(("Content-Length", str(length)))
    return http1.encode_head(status, [*fields, *more])


def stream(*events):
    """A whole chunked stream, an event a chunk."""
    return [HEAD_CHUNKED, *map(http1.encode_chunk, events), http1.LAST_CHUNK]


def document(content, status=200, media_type="application/json", *more):
    return [head(status, media_type, len(content), *more), content]


def bytewise(script):
    return [bytes([byte]) for part in script for byte in part]


async def replay(script, body=PROMPT, options=client.DEFAULT_OPTIONS, path="/stream"):
    async with scripted(script) as server:
        return await asyncio.wait_for(ask(server.url(path), body, options), 20)


TWO = stream(piece("Two"), piece(" plus"), DONE)
USAGE = {"prompt_tokens": 5, "completion_tokens": 2}


class TestEventStream:
    @pytest.mark.parametrize("cut", [list, bytewise, lambda s: [b"".join(s)]])
    async def test_plain(self, cut):
        last = {"usage": USAGE, "finish_reason": "stop", "timings": {"queued": 0.1}}
        reply = await replay(cut(stream(piece("Two"), piece(" plus"), event(last), DONE)))
        assert reply.complete
        assert reply.error is None
        assert reply.pieces == ["Two", " plus"]
        assert (reply.status, reply.version, reply.mode) == (200, "1.1", "sse")
        assert (reply.usage, reply.finish_reason, reply.timings["queued"]) == (USAGE, "stop", 0.1)
        assert len(reply.events) == 4

    async def test_named(self):
        done = {"finish_reason": "length", "usage": USAGE, "timings": {}}
        reply = await replay(
            stream(
                event({"text": "Two"}, event="token"),
                event({"type": "ping"}, event="ping"),
                sse.encode("not JSON, and not ours", event="other"),
                event(done, event="done"),
            )
        )
        assert reply.complete
        assert (reply.text, reply.finish_reason, reply.usage) == ("Two", "length", USAGE)

    async def test_bare(self):
        reply = await replay(stream(event("Two"), event(' "plus"'), DONE))
        assert reply.complete
        assert reply.pieces == ["Two", ' "plus"']

    async def test_dates_are_in_order(self):
        reply = await replay(bytewise(TWO))
        dates = [reply.first_byte, reply.first_text, reply.last_text, reply.end, reply.close]
        assert dates == sorted(dates)
        assert reply.first_byte > 0
        assert reply.connect > 0
        assert [e.at for e in reply.events] == sorted(e.at for e in reply.events)
        assert reply.gaps().n == 1

    async def test_what_is_no_text_is_neither_first_nor_a_piece(self, wires):
        """Field reports 142 and 143: heartbeats, null, "" and no key at all."""
        heard = asyncio.Event()
        nothing = [
            b": ping\n\n",
            *map(event, ({"text": None}, {"text": ""}, {"role": "assistant"})),
        ]
        script = [*stream(*nothing)[:-1], heard, http1.encode_chunk(piece("Hi") + DONE)]
        async with scripted([*script, http1.LAST_CHUNK]) as server, Session() as session:
            asking = asyncio.create_task(session.ask(server.url(), PROMPT))
            await until(lambda: wires and wires[0].received == sum(map(len, script[:-2])))
            heard.set()
            reply = await asking
        assert reply.pieces == ["Hi"]
        assert reply.comments == 1
        assert reply.first_text == reply.events[3].at > reply.first_byte

    async def test_usage_with_every_piece_ends_nothing(self):
        """Field report 115."""
        counted = [
            event({"text": t, "usage": {"completion_tokens": n}}) for n, t in enumerate("abc")
        ]
        reply = await replay(stream(*counted, DONE))
        assert reply.complete
        assert reply.text == "abc"
        assert reply.completion_tokens == 2

    async def test_five_events_in_one_read(self):
        """Field report 151: five dates that are equal, and the number of reads that tells why."""
        reply = await replay([b"".join(stream(*map(piece, "abcde"), DONE))])
        assert len({e.at for e in reply.events}) == 1
        assert (reply.gaps().n, reply.gaps().max) == (4, 0.0)
        assert reply.reads == 1
        assert reply.time_per_output_token().seconds is None

    async def test_an_event_is_dated_by_the_read_that_completed_it(self):
        """Field report 151: half an event is none, however long its other half takes."""
        half, rest = piece("Hi")[:9], piece("Hi")[9:]
        pause = 0.1
        body = HEAD_CLOSE + half

        async def wait(peer):
            await asyncio.sleep(pause)

        reply = await replay([body, wait, rest, DONE])
        assert reply.first_text >= pause
        assert reply.first_byte < reply.first_text

    async def test_an_empty_reply_is_complete(self):
        """Field report 152."""
        reply = await replay(stream(event({"finish_reason": "stop", "usage": {}}), DONE))
        assert reply.complete
        assert (reply.text, reply.first_text) == ("", None)

    async def test_text_is_kept_when_the_reply_hits_its_length(self):
        """Field report 131."""
        reply = await replay(stream(piece("cut o"), event({"finish_reason": "length"}), DONE))
        assert (reply.complete, reply.text, reply.finish_reason) == (True, "cut o", "length")

    @pytest.mark.parametrize(
        "error",
        [
            event({"message": "quota", "type": "overloaded"}, event="error"),
            event({"error": {"message": "quota"}}),
            event({"error": {"message": "quota"}}, event="error"),
            event({"error": "quota"}),
            sse.encode("quota", event="error"),
        ],
    )
    @pytest.mark.parametrize("tail", [b"", DONE])
    async def test_an_error_in_the_stream_fails_the_reply(self, error, tail):
        """Field report 55, with and without [DONE] after it."""
        reply = await replay(stream(piece("so far"), error, *filter(None, [tail])))
        assert not reply.complete
        assert (reply.failure, reply.error) == (Failure.IN_BAND, "quota")
        assert reply.text == "so far"
        assert reply.close is not None

    @pytest.mark.parametrize(
        "data",
        ["{", "[]", "7", '{"text": 7}', '{"text": NaN}', "[" * 100_000, "9" * 5000, "hello"],
        ids=["cut", "list", "number", "no string", "NaN", "deep", "long", "word"],
    )
    async def test_what_is_not_the_dialect_is_a_protocol_failure(self, data):
        reply = await replay(stream(piece("a"), sse.encode(data), DONE))
        assert reply.failure is Failure.PROTOCOL
        assert reply.text == "a"
        assert len(reply.error) < 400

    async def test_text_after_the_end(self):
        reply = await replay(stream(piece("a"), DONE, piece("b")))
        assert reply.failure is Failure.PROTOCOL
        assert reply.text == "a"

    async def test_an_event_without_end_is_bounded(self, monkeypatch):
        """Field report 54."""
        monkeypatch.setattr(contents, "MAX_EVENT_BYTES", 100_000)
        reply = await replay([HEAD_CLOSE, *[b"data: " + b"x" * 10_000 + b"\n"] * 30])
        assert reply.failure is Failure.PROTOCOL
        assert "100000" in reply.error

    async def test_a_reply_without_end_is_bounded(self, monkeypatch):
        monkeypatch.setattr(roundtrip, "MAX_REPLY_BYTES", 100_000)
        reply = await replay([HEAD_CLOSE, *[b": ping\n\n" * 1000] * 30])
        assert reply.failure is Failure.PROTOCOL
        assert "100000" in reply.error

    async def test_pieces_are_called_for_as_they_come(self):
        seen, more = [], asyncio.Event()

        def on_piece(text):
            seen.append(text)
            more.set()

        chunks = [http1.encode_chunk(piece(text)) for text in "ab"]
        script = [HEAD_CHUNKED, chunks[0], more, chunks[1], http1.encode_chunk(DONE)]
        reply = await replay([*script, http1.LAST_CHUNK], options=Options(on_piece=on_piece))
        assert seen == reply.pieces == ["a", "b"]


class TestTruncation:
    """Field report 12: what is cut is never complete, and what has come is kept."""

    @pytest.mark.parametrize(
        ("script", "failure", "words"),
        [
            (TWO[:-1], Failure.TRUNCATED, "middle of a message"),
            ([*TWO[:2], b"7\r\nFoo"], Failure.TRUNCATED, "middle of a message"),
            ([*TWO[:2], reset], Failure.TRUNCATED, "connection lost"),
            ([HEAD_CLOSE, piece("Two")], Failure.NO_END_MARKER, "without [DONE]"),
            ([HEAD_CLOSE, piece("Two"), b": ping\n\n"], Failure.NO_END_MARKER, "without [DONE]"),
            ([HEAD_CLOSE, piece("Two"), piece("x")[:-1]], Failure.NO_END_MARKER, "inside an event"),
            (
                [HEAD_CLOSE, piece("Two"), b"data: [DONE]\n"],
                Failure.NO_END_MARKER,
                "no blank line after 'data: [DONE]'",
            ),
            (
                [HEAD_CLOSE, piece("Two"), b"data: [DONE]"],
                Failure.NO_END_MARKER,
                "no blank line after 'data: [DONE]'",
            ),
            (stream(piece("Two")), Failure.NO_END_MARKER, "without [DONE]"),
            ([head(200, "text/event-stream", 99), piece("Two")], Failure.TRUNCATED, "middle"),
        ],
        ids=[
            "no last chunk", "inside a chunk", "reset", "close: no end", "close: comment",
            "48 inside an event", "48 [DONE] without its blank line", "48 without its line end",
            "last chunk without [DONE]", "content length",
        ],
    )  # fmt: skip
    async def test_stream(self, script, failure, words):
        got = asyncio.Event()  # the text has arrived before the cut
        options = Options(on_piece=lambda text: got.set())
        cut = next(i for i, part in enumerate(script) if b"Two" in part) + 1
        reply = await replay([*script[:cut], got, *script[cut:]], options=options)
        assert not reply.complete
        assert reply.failure is failure
        assert words in reply.error
        assert reply.text.startswith("Two")

    @pytest.mark.parametrize(
        ("script", "failure"),
        [
            ([], Failure.TRUNCATED),
            ([reset], Failure.TRUNCATED),
            ([b"HTTP/1.1 20"], Failure.TRUNCATED),
            ([HEAD_CHUNKED[:-2]], Failure.TRUNCATED),
            ([b"HTTP/1.1 100 Continue\r\n\r\n"], Failure.TRUNCATED),
            ([head(200, "application/json", 99), b'{"text": "a"'], Failure.TRUNCATED),
            ([head(200, "application/json"), b'{"text": "a"'], Failure.NOT_A_REPLY),
            ([b"SSH-2.0-OpenSSH_9.2\r\n"], Failure.PROTOCOL),
            ([b"HTTP/1.1 200 OK\r\nBad Name: x\r\n\r\n"], Failure.PROTOCOL),
            ([head(200, "application/json", None, CHUNKED), b"zz\r\n"], Failure.PROTOCOL),
            ([HEAD_CHUNKED.replace(b"Tr", b"Content-Length: 5\r\nTr")], Failure.PROTOCOL),
            ([b"HTTP/1.1 101 Switching Protocols\r\n\r\n"], Failure.PROTOCOL),
        ],
        ids=[
            "nothing", "reset", "status line", "head", "interim alone", "document",
            "document without length", "another protocol", "field line", "chunk size",
            "two lengths", "101 unasked",
        ],
    )  # fmt: skip
    async def test_response(self, script, failure):
        reply = await replay(script, options=Options(mode=Mode.JSON))
        assert reply.failure is failure
        assert reply.error
        assert reply.first_text is None

    @pytest.mark.skipif(sys.platform != "linux", reason="other kernels drop what was not read")
    async def test_bytes_before_a_reset_are_kept(self):
        """The reset comes right behind them, before anybody has read."""
        reply = await replay([HEAD_CLOSE + piece("Two"), reset])
        assert reply.text == "Two"
        assert reply.failure is Failure.TRUNCATED


class TestDocument:
    async def test_reply(self):
        content = json.dumps({"text": "Two €", "finish_reason": "stop", "usage": USAGE}).encode()
        reply = await replay(document(content), path="/complete")
        assert reply.complete
        assert (reply.mode, reply.text, reply.finish_reason) == ("json", "Two €", "stop")
        assert reply.first_text == reply.last_text == reply.end == reply.events[0].at
        assert reply.time_per_output_token().seconds is None
        assert reply.gaps().n == 0

    async def test_close_delimited(self):
        reply = await replay([head(), b'{"text"', b': ""}'], path="/wait")
        assert (reply.complete, reply.text, reply.first_text) == (True, "", None)

    async def test_an_error_in_a_200(self):
        reply = await replay(document(b'{"error": {"message": "quota"}}'), path="/complete")
        assert (reply.failure, reply.error) == (Failure.IN_BAND, "quota")


class TestRefusals:
    """Field report 154: each is a failure of its own kind, with the status and the reason."""

    @pytest.mark.parametrize(
        ("script", "failure", "words"),
        [
            (document(b'{"text": "Hi"}'), Failure.NOT_A_STREAM, "application/json"),
            (document(b"<p>oops", 200, "text/html"), Failure.NOT_A_STREAM, "text/html"),
            (document(b"", 200, None), Failure.NOT_A_STREAM, "unknown"),
            (document(b"", 200, "text/event-stream"), Failure.NO_END_MARKER, "[DONE]"),
            (document(b"<h1>oops", 500, "text/html"), Failure.STATUS, "500 Internal Server Error"),
            (
                document(b'{"error": {"message": "busy", "type": "x"}}', 429),
                Failure.STATUS,
                "429 Too Many Requests: busy",
            ),
            (document(b"no", 404, "text/plain"), Failure.STATUS, "404 Not Found: no"),
            ([b"HTTP/1.1 204 No Content\r\n\r\n"], Failure.STATUS, "204"),
            ([b"HTTP/1.1 304 Not Modified\r\n\r\n"], Failure.STATUS, "304"),
            (
                document(b"", 307, None, ("Location", "/v2/stream")),
                Failure.REDIRECT,
                "307 Temporary Redirect to /v2/stream",
            ),
            (
                document(b"\x1f\x8b", 200, "text/event-stream", ("Content-Encoding", "br")),
                Failure.CODING,
                "br is not decoded",
            ),
            ([head(500, "text/plain", 99), b"half"], Failure.STATUS, "500"),
        ],
        ids=[
            "JSON", "HTML", "empty", "empty stream", "500 page", "429", "404", "204", "304",
            "redirect", "br", "cut page",
        ],
    )  # fmt: skip
    async def test_stream(self, script, failure, words):
        reply = await replay(script)
        assert not reply.complete
        assert reply.failure is failure
        assert words in reply.error
        assert (reply.text, reply.first_text) == ("", None)
        assert reply.status is not None
        assert reply.first_byte is not None

    @pytest.mark.parametrize("path", ["/complete", "/ws"])
    async def test_a_stream_where_another_reply_was_asked_for(self, path):
        reply = await replay(stream(piece("a"), DONE), path=path)
        assert not reply.complete
        assert reply.status == 200

    @pytest.mark.parametrize("content", [b"[]", b"{}", b'{"text": 7}', b"", b"\xff"])
    async def test_a_document_that_is_no_reply(self, content):
        reply = await replay(document(content), path="/complete")
        assert reply.failure is Failure.NOT_A_REPLY

    async def test_nobody_listens(self):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
            reply = await ask(f"http://127.0.0.1:{port}/stream", PROMPT)
        assert reply.failure is Failure.CONNECT
        assert reply.error == f"127.0.0.1:{port}: Connection refused"
        assert (reply.connect, reply.first_byte, reply.received.total) == (None, None, 0)

    async def test_a_host_with_several_addresses(self, monkeypatch):
        """The first refuses: the next is asked."""
        async with scripted(TWO) as server:
            host, port = server.address.split(":")
            loop = asyncio.get_running_loop()
            kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
            addresses = [(*kind, ("127.0.0.1", 1)), (*kind, (host, int(port)))]

            async def getaddrinfo(*args, **kwargs):
                return addresses

            monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
            assert (await ask("http://two.example/stream", PROMPT)).complete
            del addresses[1]
            assert (await ask("http://one.example/stream", PROMPT)).failure is Failure.CONNECT

    async def test_no_such_host(self):
        reply = await ask("http://no-such-host.invalid/stream", PROMPT)
        assert reply.failure is Failure.CONNECT

    async def test_tls_to_a_plain_port(self):
        async def answer(peer):
            await peer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        listener = await asyncio.start_server(_say_400, "127.0.0.1", 0)
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            reply = await ask(f"https://127.0.0.1:{port}/stream", PROMPT)
        assert reply.failure is Failure.TLS


async def _say_400(reader, writer):
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    writer.close()


class TestInterimResponses:
    """Field report 15: what is measured and reported is the final response."""

    HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"

    @pytest.mark.parametrize("cut", [list, bytewise, lambda s: [b"".join(s)]])
    async def test_are_noted_and_passed_over(self, cut):
        reply = await replay(cut([b"HTTP/1.1 100 Continue\r\n\r\n", self.HINTS, *TWO]))
        assert reply.complete
        assert (reply.status, reply.interim) == (200, [100, 103])
        assert reply.received.head == len(b"HTTP/1.1 100 Continue\r\n\r\n" + self.HINTS + TWO[0])

    async def test_the_first_byte_is_the_final_responses(self):
        pause = 0.1

        async def wait(peer):
            await asyncio.sleep(pause)

        reply = await replay([self.HINTS, wait, *TWO])
        assert reply.first_byte >= pause


class TestByteCounts:
    """Field report 153: every byte in one class, and their sum is what the server wrote."""

    @pytest.mark.parametrize("cut", [list, bytewise, lambda s: [b"".join(s)]])
    async def test_chunked(self, cut):
        events = [piece("Two"), b": ping\n\n", piece(" plus"), DONE]
        async with scripted(cut(stream(*events))) as server:
            reply = await ask(server.url(), PROMPT)
        framing = sum(len(http1.encode_chunk(e)) - len(e) for e in events) + len(http1.LAST_CHUNK)
        assert reply.received.head == len(HEAD_CHUNKED)
        assert reply.received.framing == framing
        assert reply.received.payload == sum(map(len, events))
        assert reply.received.unparsed == 0
        assert reply.received.total == server.peer.written
        assert reply.sent == len(server.peer.request_bytes)
        assert reply.text_bytes == len("Two plus")

    @pytest.mark.parametrize("cut", [list, bytewise])
    async def test_close_delimited(self, cut):
        async with scripted(cut([HEAD_CLOSE, piece("é"), DONE])) as server:
            reply = await ask(server.url(), PROMPT)
        assert reply.complete
        assert reply.received.framing == 0
        assert reply.received.payload == len(piece("é") + DONE)
        assert reply.received.total == server.peer.written

    async def test_a_byte_a_read(self, wires):
        """The server waits until each byte was read; a read is neither an event nor a token."""
        raw = bytewise(stream(piece("a"), DONE))
        async with scripted(lockstep(raw, wires)) as server, Session() as session:
            reply = await session.ask(server.url(), PROMPT)
        assert reply.reads == len(raw)
        assert reply.received.total == server.peer.written == len(raw)
        assert len(reply.events) == 2

    @pytest.mark.parametrize("end", range(0, len(b"".join(TWO)), 7))
    async def test_wherever_it_is_cut(self, end):
        raw = b"".join(TWO)[:end]
        async with scripted([raw]) as server:
            reply = await ask(server.url(), PROMPT)
        assert not reply.complete
        assert reply.received.total == server.peer.written == end
        assert min(vars_of(reply.received)) >= 0

    @pytest.mark.parametrize("seed", range(60))
    async def test_whatever_the_server_sends(self, seed):
        """Bytes changed, dropped and doubled: a failure at worst, and never a byte uncounted."""
        draw = random.Random(seed)
        raw = bytearray(b"".join([TestInterimResponses.HINTS, *TWO]))
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(raw))
            part = bytes(raw[at : at + draw.randint(1, 8)])
            raw[at : at + 1] = draw.choice([b"", part * 2, draw.randbytes(2), b"\r", b"\n"])
        async with scripted([bytes(raw)]) as server:
            reply = await asyncio.wait_for(ask(server.url(), PROMPT), 20)
        assert reply.complete == (reply.error is None)
        assert reply.received.total == len(raw)
        assert min(vars_of(reply.received)) >= 0
        assert tally.reply_table(reply)

    async def test_what_belongs_to_no_message(self):
        async with scripted([*TWO, b"surplus"]) as server, Session() as session:
            reply = await session.ask(server.url(), PROMPT)
        assert reply.complete
        assert reply.received.total - reply.received.unparsed == len(b"".join(TWO))

    async def test_websocket(self):
        messages = [
            text_frame({"text": "Two"}),
            text_frame({"done": True, "finish_reason": "stop"}),
        ]
        ping = websocket.encode_frame(9, b"x")
        close = websocket.encode_frame(8, b"\x03\xe8")
        script = [switch, hear(ASKED), messages[0], ping, messages[1], close]
        async with scripted(script) as server:
            reply = await ask(server.url("/ws"), PROMPT)
        payload = sum(len(m) - 2 for m in messages)
        frames = sum(map(len, [*messages, ping, close]))
        assert reply.complete
        assert reply.received.payload == payload
        assert reply.received.framing == frames - payload
        assert reply.received.total == server.peer.written


def vars_of(count):
    return count.head, count.framing, count.payload, count.unparsed


def lockstep(parts, wires):
    """Step: write the next part once the client has read the one before."""

    async def play(peer):
        for part in parts:
            await peer.write(part)
            await until(lambda: wires[0].received == peer.written)

    return [play]


@pytest.fixture
def wires(monkeypatch):
    """The client's ends of a test's connections."""
    made, wires = wire.Wire.connection_made, []

    def connection_made(self, transport):
        wires.append(self)
        made(self, transport)

    monkeypatch.setattr(wire.Wire, "connection_made", connection_made)
    return wires


def text_frame(record):
    return websocket.encode_frame(1, json.dumps(record).encode())


async def switch(peer):
    """Step: accept the opening handshake."""
    request, _ = peer.requests[-1]
    websocket.check_request(request)
    await peer.write(http1.encode_head(101, websocket.response_fields(request)))


def hear(*messages):
    """Step: read until the client has sent as many messages, and put them into the list."""

    async def step(peer):
        if not hasattr(peer, "connection"):
            peer.connection = websocket.Connection(websocket.Side.SERVER)
            peer.heard = []
        while True:
            while (event := peer.connection.next_event()) is not None:
                peer.heard.append(event)
                if event == messages[-1]:
                    return
            peer.connection.feed(await peer.reader.read(65536))

    return step


class TestWebSocket:
    DONE = text_frame({"done": True, "finish_reason": "stop", "usage": USAGE, "timings": {"a": 1}})
    CLOSE = websocket.encode_frame(8, b"\x03\xe8")

    async def test_reply(self):
        heard = hear(ASKED), hear(websocket.Close(1000, ""))
        script = [switch, heard[0], text_frame({"text": "Two"}), self.DONE, heard[1], self.CLOSE]
        async with scripted(script) as server:
            reply = await ask(server.url("/ws", "ws"), PROMPT)
            assert server.peer.heard == [ASKED, websocket.Close(1000, "")]
        assert reply.complete
        assert (reply.status, reply.mode, reply.text) == (101, "websocket", "Two")
        assert (reply.finish_reason, reply.usage, reply.timings) == ("stop", USAGE, {"a": 1})
        assert reply.close_code == 1000
        dates = [reply.first_byte, reply.opened, reply.first_text, reply.end, reply.close]
        assert dates == sorted(dates)

    async def test_stop_is_sent_once_and_the_reply_read_to_its_end(self):
        stop = websocket.Message('{"stop": true}')
        pieces = [text_frame({"text": text}) for text in "abc"]
        script = [switch, hear(ASKED), *pieces[:2], hear(stop), pieces[2], self.DONE]
        async with scripted([*script, hear(websocket.Close(1000, "")), self.CLOSE]) as server:
            reply = await ask(server.url("/ws"), PROMPT, Options(stop_after=2))
            assert server.peer.heard.count(stop) == 1
        assert reply.complete
        assert reply.text == "abc"

    async def test_pings_are_answered_and_counted(self):
        ping = websocket.encode_frame(9, b"alive?")
        script = [switch, ping, hear(websocket.Pong(b"alive?")), self.DONE, self.CLOSE]
        reply = await replay(script, path="/ws")
        assert reply.complete
        assert reply.pings == 1

    @pytest.mark.parametrize(
        ("frames", "failure", "words"),
        [
            ([text_frame({"error": {"message": "quota"}})], Failure.IN_BAND, "quota"),
            ([CLOSE], Failure.NO_END_MARKER, "closed with 1000 before done"),
            (
                [websocket.encode_frame(8, b"\x03\xf3restart")],
                Failure.NO_END_MARKER,
                "1011 before done: restart",
            ),
            ([], Failure.TRUNCATED, "without done"),
            ([text_frame({"text": "x"})[:-1]], Failure.TRUNCATED, "without done"),
            ([reset], Failure.TRUNCATED, "connection lost"),
            ([websocket.encode_frame(1, b"hi", mask=b"abcd")], Failure.PROTOCOL, "mask"),
            ([websocket.encode_frame(8, b"\x03\xe8", mask=b"abcd")], Failure.PROTOCOL, "mask"),
            ([websocket.encode_frame(2, b"{}")], Failure.PROTOCOL, "binary"),
            ([websocket.encode_frame(1, b"\xff")], Failure.PROTOCOL, "UTF-8"),
            ([websocket.encode_frame(1, b"hello")], Failure.PROTOCOL, "JSON"),
        ],
        ids=[
            "error", "close", "close with a reason", "end-of-file", "cut frame", "reset",
            "59 masked text", "59 masked close", "binary", "not UTF-8", "not JSON",
        ],
    )  # fmt: skip
    async def test_failures_keep_the_text(self, frames, failure, words):
        got = asyncio.Event()
        options = Options(on_piece=lambda text: got.set())
        script = [switch, hear(ASKED), text_frame({"text": "so far"}), got, *frames]
        reply = await replay(script, path="/ws", options=options)
        assert not reply.complete
        assert reply.failure is failure
        assert words in reply.error
        assert reply.text == "so far"

    async def test_a_violation_is_answered_with_its_code(self):
        bad = websocket.encode_frame(1, b"\xff")
        refusal = websocket.Close(1007, "text is not UTF-8")
        async with scripted([switch, hear(ASKED), bad, hear(refusal)]) as server:
            reply = await ask(server.url("/ws"), PROMPT)
            await until(lambda: server.peer.heard[-1] == refusal)
        assert reply.failure is Failure.PROTOCOL

    async def test_done_is_enough(self):
        """A message cannot be cut unnoticed: how the connection ends does not matter then."""
        script = [switch, hear(ASKED), text_frame({"text": "a"}), self.DONE]
        reply = await replay([*script, hear(websocket.Close(1000, "")), reset], path="/ws")
        assert reply.complete
        assert reply.close_code is None

    @pytest.mark.parametrize(
        ("script", "failure"),
        [
            (document(b'{"error": {"message": "upgrade"}}', 426), Failure.STATUS),
            (document(b"", 403, None), Failure.STATUS),
            ([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"], Failure.PROTOCOL),
            (
                [
                    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                    b"Connection: Upgrade\r\nSec-WebSocket-Accept: AAAA\r\n\r\n"
                ],
                Failure.PROTOCOL,
            ),
        ],
        ids=["426", "403", "no Connection", "wrong accept"],
    )
    async def test_opening_handshake_refused(self, script, failure):
        reply = await replay(script, path="/ws")
        assert reply.failure is failure
        assert reply.opened is None


class TestLeaving:
    @pytest.mark.parametrize("how", ["close", "reset"])
    @pytest.mark.parametrize("pieces", [0, 1, 3])
    async def test_after_some_pieces(self, how, pieces):
        script = [*stream(*map(piece, "abcdef"))[:-1], until_client_ends]
        async with scripted(script) as server:
            options = Options(leave_after=pieces, leave=how)
            reply = await ask(server.url(), PROMPT, options)
            await until(lambda: server.peers)
            if pieces:  # before that the reset may come before the request is read
                ended = await server.peer.ended
                assert how == "close" or isinstance(ended, ConnectionResetError)
        assert reply.failure is Failure.CANCELLED
        assert reply.error == f"left by {how} after {pieces} pieces"
        assert reply.text == "abcdef"[:pieces]
        assert reply.left is not None

    async def test_half_closed_it_reads_on(self):
        script = [*TWO[:2], until_client_ends, *TWO[2:]]
        async with scripted(script) as server:
            options = Options(leave_after=1, leave="half-close")
            reply = await ask(server.url(), PROMPT, options)
            assert await server.peer.ended == b""
        assert reply.complete
        assert reply.text == "Two plus"
        assert reply.left is not None

    async def test_half_closed_right_after_the_request(self):
        options = Options(leave_after=0, leave="half-close")
        reply = await replay([until_client_ends, *TWO], options=options)
        assert reply.complete

    @pytest.mark.parametrize("how", ["close", "half-close"])
    async def test_at_a_time(self, how):
        """The server sends the rest only after the client has left."""
        options = Options(leave_at=0.05, leave=how)
        reply = await replay([*TWO[:2], until_client_ends, *TWO[2:]], options=options)
        assert reply.left >= 0.05
        assert reply.complete == (how == "half-close")

    async def test_a_websocket(self):
        frames = [text_frame({"text": text}) for text in "abc"]
        script = [switch, *frames, until_client_ends]
        async with scripted(script) as server:
            reply = await ask(server.url("/ws"), PROMPT, Options(leave_after=2))
            await server.peer.ended
        assert reply.failure is Failure.CANCELLED
        assert reply.text == "ab"

    async def test_too_late(self):
        reply = await replay([*TWO[:2], until_client_ends], options=Options(timeout=0.2))
        assert reply.failure is Failure.TIMEOUT
        assert "0.2 s" in reply.error

    async def test_an_end_marker_that_ends_nothing(self, monkeypatch):
        monkeypatch.setattr(roundtrip, "LINGER_S", 0.1)
        reply = await replay([*TWO[:-1], until_client_ends])
        assert reply.failure is Failure.TIMEOUT
        assert "end marker" in reply.error
        assert reply.end is not None

    async def test_a_server_that_reads_nothing_cannot_keep_us(self, monkeypatch):
        monkeypatch.setattr(wire, "CLOSE_S", 0.05)
        over = asyncio.Event()

        async def ignore(reader, writer):
            await over.wait()
            writer.close()

        listener = await asyncio.start_server(ignore, "127.0.0.1", 0)
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            body = {"prompt": "x" * 30_000_000}  # more than the kernel's buffers hold
            reply = await ask(f"http://127.0.0.1:{port}/stream", body, Options(leave_after=0))
            over.set()
        assert reply.failure is Failure.CANCELLED

    async def test_cancelled_it_closes_its_connection(self):
        got = asyncio.Event()
        options = Options(on_piece=lambda text: got.set())
        async with scripted([*TWO[:2], until_client_ends]) as server:
            asking = asyncio.create_task(ask(server.url(), PROMPT, options))
            await got.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert await server.peer.ended == b""

    async def test_a_callback_that_fails_is_not_the_servers_fault(self):
        def on_piece(text):
            raise BrokenPipeError

        async with scripted([*TWO[:2], until_client_ends]) as server:
            with pytest.raises(BrokenPipeError):
                await ask(server.url(), PROMPT, Options(on_piece=on_piece))
            assert await server.peer.ended == b""


class TestSession:
    async def test_requests_share_a_connection(self, wires):
        answers = [TWO, document(b'{"text": "x"}'), document(b"{}", 400), TWO]
        paths = ["/stream", "/complete", "/complete", "/stream"]
        async with scripted(*answers, TWO) as server, Session() as session:
            replies = [await session.ask(server.url(path), PROMPT) for path in paths]
            assert len(server.peers) == 1
            assert server.peer.written == sum(reply.received.total for reply in replies)
            assert len(server.peer.request_bytes) == sum(reply.sent for reply in replies)
            (wire,) = wires
            assert wire.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert [reply.complete for reply in replies] == [True, True, False, True]
        assert [reply.connect is None for reply in replies] == [False, True, True, True]
        assert replies[3].first_byte > 0

    @pytest.mark.parametrize(
        "first",
        [
            [HEAD_CLOSE, piece("Two"), DONE],
            [TWO[0].replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), *TWO[1:]],
            [*TWO, b"surplus"],
            TWO[:-1],
        ],
        ids=["close-delimited", "Connection: close", "surplus", "truncated"],
    )
    async def test_a_connection_that_cannot_go_on_is_replaced(self, first):
        async def close(peer):
            peer.writer.close()

        async with scripted([*first, close], TWO) as server, Session() as session:
            await session.ask(server.url(), PROMPT)
            reply = await session.ask(server.url(), PROMPT)
            assert len(server.peers) == 2
        assert reply.complete
        assert reply.connect is not None

    async def test_a_connection_closed_while_idle_is_replaced(self, wires):
        async def close(peer):
            peer.writer.close()
            await peer.writer.wait_closed()

        async with scripted([*TWO, close], TWO) as server, Session() as session:
            first = await session.ask(server.url(), PROMPT)
            await until(lambda: not wires[0].idle)
            second = await session.ask(server.url(), PROMPT)
        assert first.complete
        assert second.complete

    async def test_what_comes_unasked_is_not_gathered(self, wires):
        """A server that talks on an idle connection fills its own buffers, not our memory."""
        refused = asyncio.Event()

        async def talk(peer):
            peer.writer.write(b"x" * 50_000_000)
            await until(lambda: not wires[0].transport.is_reading())
            refused.set()

        async with scripted([*TWO, talk]) as server, Session() as session:
            await session.ask(server.url(), PROMPT)
            await refused.wait()
            assert wires[0].received < 20_000_000

    async def test_is_for_one_origin(self):
        async with scripted(TWO) as server, Session() as session:
            await session.ask(server.url(), PROMPT)
            with pytest.raises(ValueError, match="one origin"):
                await session.ask("http://localhost:1/stream", PROMPT)


class TestRequest:
    async def request(self, body, options=client.DEFAULT_OPTIONS, path="/stream"):
        async with scripted(TWO) as server:
            await ask(server.url(path), body, options)
            request, content = server.peer.requests[0]
            assert request.fields.get("host") == server.address
        return request, content

    async def test_post(self):
        request, content = await self.request({"prompt": "é", "max_tokens": 3})
        assert (request.method, request.target, request.version) == ("POST", "/stream", (1, 1))
        assert json.loads(content) == {"prompt": "é", "max_tokens": 3}
        assert request.fields.get("accept") == "text/event-stream"
        assert request.fields.get("accept-encoding") == "identity"
        assert request.fields.get("content-type") == "application/json"

    async def test_get(self):
        body = {"prompt": "a b&c é", "max_tokens": 3, "usage": True, "stop": ["x"]}
        request, content = await self.request(body, Options(method="GET"), "/stream?a=1")
        assert (request.method, request.path, content) == ("GET", "/stream", b"")
        assert dict(request.query) == {
            "a": "1", "prompt": "a b&c é", "max_tokens": "3", "usage": "true", "stop": '["x"]',
        }  # fmt: skip

    async def test_http_1_0(self):
        request, _ = await self.request(PROMPT, Options(http_version="1.0"))
        assert request.version == (1, 0)

    async def test_fields_are_added_or_replaced(self):
        fields = (("accept", "*/*"), ("Authorization", "Bearer x"))
        request, _ = await self.request(PROMPT, Options(fields=fields))
        assert request.fields.get_all("accept") == ["*/*"]
        assert request.fields.get("authorization") == "Bearer x"

    @pytest.mark.parametrize(
        ("url", "options"),
        [
            ("127.0.0.1:8765", Options()),
            ("ftp://127.0.0.1/", Options()),
            ("http://", Options()),
            ("http://127.0.0.1:99999/", Options()),
            ("http://a..b/", Options()),
            ("http://user:secret@127.0.0.1/", Options()),
            ("http://127.0.0.1/", Options(stop_after=1)),
            ("ws://127.0.0.1/", Options(http_version="1.0")),
            ("https://127.0.0.1/", Options(leave="half-close")),
            ("http://127.0.0.1/", Options(fields=(("a", "b\r\nc: d"),))),
            ("http://127.0.0.1/", Options(fields=(("content-Length", "3"),))),
            ("http://127.0.0.1/", Options(fields=(("Transfer-Encoding", "chunked"),))),
            ("http://127.0.0.1:0/", Options()),
            ("http://a b/", Options()),
            ("http://a%41/", Options()),
            ("http://../", Options()),
            (f"http://{'a' * 64}/", Options()),
            ("http://127.0.0.1/", Options(timeout=0)),
            ("http://127.0.0.1/", Options(timeout=float("nan"))),
            ("http://127.0.0.1/", Options(leave_at=-1)),
            ("http://127.0.0.1/", Options(leave_at=float("nan"))),
            ("http://127.0.0.1/", Options(leave_after=-1)),
            ("ws://127.0.0.1/", Options(stop_after=0)),
        ],
    )
    async def test_our_own_mistakes_are_value_errors(self, url, options):
        with pytest.raises(ValueError):
            await ask(url, PROMPT, options)

    @pytest.mark.parametrize(
        ("url", "host", "port", "authority", "path", "mode"),
        [
            ("http://localhost", "localhost", 80, "localhost", "/", "sse"),
            ("https://Example.org/wait", "example.org", 443, "example.org", "/wait", "json"),
            ("ws://[::1]:8765/x", "::1", 8765, "[::1]:8765", "/x", "websocket"),
            ("http://h:1/ws", "h", 1, "h:1", "/ws", "websocket"),
            ("http://bücher.example/a b/é", "xn--bcher-kva.example", 80, "xn--bcher-kva.example",
             "/a%20b/%C3%A9", "sse"),
        ],
    )  # fmt: skip
    def test_targets(self, url, host, port, authority, path, mode):
        target = client.Target.parse(url)
        assert (target.host, target.port, target.authority) == (host, port, authority)
        assert (target.path, target.mode) == (path, mode)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", "/CN=localhost", "-keyout", key, "-out", certificate]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs the openssl command for a certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


class TestTls:
    @pytest.mark.parametrize("scheme", ["https", "wss"])
    async def test_a_certificate_is_checked_unless_told_otherwise(self, certificate, scheme):
        done = text_frame({"done": True})
        frames = [switch, hear(ASKED), text_frame({"text": "Two plus"}), done]
        script = TWO if scheme == "https" else frames
        async with scripted(script, ssl=certificate) as server:
            url = server.url("/stream", scheme)
            refused = await ask(url, PROMPT)
            reply = await ask(url, PROMPT, insecure=True)
        assert refused.failure is Failure.TLS
        assert "certificate" in refused.error
        assert reply.complete
        assert reply.text == "Two plus"
        assert reply.received.total == server.peers[-1].written

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ([head(media_type="text/plain"), b"Two"], "end-of-file"),
            ([head(media_type="text/event-stream"), piece("Two")], "end-of-file"),
            ([head(media_type="text/event-stream"), piece("Two"), DONE], "end marker"),
            ([head(200, "text/plain", 3), b"Two"], "length"),
        ],
    )
    async def test_an_end_without_close_notify_may_be_a_cut(self, certificate, content, said):
        """RFC 9112 section 9.8: of what only the close would end."""

        async def cut(peer):
            peer.writer.transport.abort()

        async with scripted([*content, cut], [*content], ssl=certificate) as server:
            url = server.url("/stream", "https")
            options = Options(mode=Mode.STREAM, dialect="auto")
            broken = await ask(url, PROMPT, options, insecure=True)
            whole = await ask(url, PROMPT, options, insecure=True)
        assert broken.text == whole.text == "Two"
        assert broken.failure is (Failure.TRUNCATED if said == "end-of-file" else None)
        marked = content[-1] is DONE or b"text/plain" in content[0]
        assert whole.failure is (None if marked else Failure.NO_END_MARKER)

    async def test_http_to_a_tls_port(self, certificate):
        async with scripted(TWO, ssl=certificate) as server:
            reply = await ask(server.url(), PROMPT)
        assert reply.failure in (Failure.PROTOCOL, Failure.TRUNCATED)


class TestRealServers:
    """Peers that other people wrote."""

    EVENTS = (piece("Two"), piece(" plus"), event({"usage": USAGE, "finish_reason": "stop"}), DONE)

    @contextlib.asynccontextmanager
    async def uvicorn(self):
        uvicorn = require("uvicorn")
        require("websockets")
        events = self.EVENTS

        async def app(scope, receive, send):
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.accept"})
                asked = json.loads((await receive())["text"])
                for record in ({"text": asked["prompt"]}, {"done": True, "finish_reason": "stop"}):
                    await send({"type": "websocket.send", "text": json.dumps(record)})
                await send({"type": "websocket.close", "code": 1000})
                return
            fields = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": fields})
            for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        config = uvicorn.Config(
            app, lifespan="off", log_config=None, http="h11", ws="websockets-sansio"
        )
        server = uvicorn.Server(config)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            config.load()
            server.lifespan = config.lifespan_class(config)
            await server.startup(sockets=[listener])
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                await server.shutdown(sockets=[listener])

    async def test_uvicorn(self):
        async with self.uvicorn() as url, Session() as session:
            for _ in range(2):
                reply = await session.ask(f"{url}/stream", PROMPT)
                assert reply.complete, reply.error
                assert (reply.text, reply.usage) == ("Two plus", USAGE)
                assert reply.received.payload == sum(map(len, self.EVENTS))
            assert reply.connect is None
            await session.close()
            reply = await session.ask(f"{url}/stream", PROMPT, Options(http_version="1.0"))
            assert reply.complete, reply.error
            assert (reply.received.framing, reply.text) == (0, "Two plus")

    async def test_uvicorn_websocket(self):
        async with self.uvicorn() as url:
            reply = await ask(f"{url}/ws", PROMPT)
        assert reply.complete, reply.error
        assert (reply.text, reply.close_code) == ("Hi", 1000)

    async def test_aiohttp(self):
        web = require("aiohttp.web")

        async def handle(request):
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for data in self.EVENTS:
                await response.write(data)
            await response.write_eof()
            return response

        async def complete(request):
            asked = await request.json()
            return web.json_response({"text": asked["prompt"], "finish_reason": "stop"})

        async def talk(request):
            connection = web.WebSocketResponse(compress=True)
            await connection.prepare(request)
            asked = await connection.receive_json()
            await connection.send_json({"text": asked["prompt"]})
            await connection.send_json({"done": True, "finish_reason": "stop"})
            await connection.receive()
            return connection

        app = web.Application()
        app.add_routes([web.post("/stream", handle), web.post("/complete", complete)])
        app.add_routes([web.get("/ws", talk)])
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = "http://{}:{}".format(*runner.addresses[0])
            async with Session() as session:
                streamed = await session.ask(f"{url}/stream", PROMPT)
                buffered = await session.ask(f"{url}/complete", PROMPT)
                talked = await session.ask(f"{url}/ws", PROMPT)
        finally:
            await runner.cleanup()
        assert [r.error for r in (streamed, buffered, talked)] == [None] * 3
        assert [r.text for r in (streamed, buffered, talked)] == ["Two plus", "Hi", "Hi"]
        assert talked.connect is None


async def run(*arguments, **environment):
    """Run the command; return its exit code, stdout and stderr."""
    process = await start(*arguments, **environment)
    out, err = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, out, err.decode()


async def start(*arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, **environment):
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "client.py"),
        *arguments,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        # In debug mode asyncio tells stderr what was slow, which a busy machine makes of anything.
        env=os.environ | {"PYTHONASYNCIODEBUG": ""} | environment,
    )


class TestCommand:
    async def test_text_to_stdout_and_measures_to_stderr(self):
        async with scripted(TWO) as server:
            code, out, err = await run(server.url(""), "--max-tokens", "7", "Hi")
            request, content = server.peer.requests[0]
        assert (code, out) == (0, b"Two plus" + os.linesep.encode())
        assert request.target == "/stream"
        assert json.loads(content) == {"prompt": "Hi", "max_tokens": 7, "usage": True}
        assert re.search(r"^reply +complete$", err, re.MULTILINE)
        assert re.search(r"^first text +\d+\.\d ms$", err, re.MULTILINE)

    @pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
    async def test_any_console_will_do(self, encoding):
        """Field report 174."""
        async with scripted(stream(piece("😀é\ud83d"), DONE)) as server:
            code, out, err = await run(server.url(), "Hi", PYTHONIOENCODING=encoding)
        assert code == 0, err
        expected = "😀é".encode(encoding, "backslashreplace") + b"\\ud83d"
        assert out == expected + os.linesep.encode()

    async def test_text_is_shown_as_it_comes(self):
        go_on = asyncio.Event()
        script = [*TWO[:2], go_on, *TWO[2:]]
        async with scripted(script) as server:
            process = await start(server.url(), "Hi")
            assert await process.stdout.readexactly(3) == b"Two"
            go_on.set()
            await process.communicate()
        assert process.returncode == 0

    @pytest.mark.parametrize(
        ("arguments", "url", "target"),
        [
            (["--route", "complete"], "", "/complete"),
            ([], "/wait", "/wait"),
            (["--route", "complete"], "/elsewhere", "/elsewhere"),
        ],
    )
    async def test_routes(self, arguments, url, target):
        async with scripted(document(b'{"text": "Hi"}')) as server:
            code, out, err = await run(*arguments, server.url(url), "Hi")
            assert server.peer.requests[0][0].target == target
        assert (code, out.strip()) == (0, b"Hi"), err

    @pytest.mark.parametrize("scheme", ["ws", "http"])
    async def test_websocket(self, scheme):
        script = [switch, hear(ASKED), text_frame({"text": "Hi"}), text_frame({"done": True})]
        async with scripted(script) as server:
            code, out, err = await run(server.url("", scheme), "--route", "ws", "Hi")
            assert server.peer.requests[0][0].target == "/ws"
        assert (code, out.strip()) == (0, b"Hi"), err

    async def test_a_failed_reply(self):
        async with scripted(TWO[:-1]) as server:
            code, out, err = await run(server.url(), "Hi")
        assert (code, out.strip()) == (1, b"Two plus")
        assert "failed: truncated" in err

    async def test_nobody_listens(self):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
            code, out, err = await run(f"http://127.0.0.1:{port}", "Hi")
        assert (code, out) == (1, b"")
        assert err.splitlines() == [
            f"client.py: cannot connect: 127.0.0.1:{port}: Connection refused"
        ]

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--route", "fax", "Hi"],
            ["localhost:8765"],
            ["example.org/stream"],
            ["ftp://example.org/"],
            ["--data", "[]"],
            ["--data", "@/no/such/file"],
            ["--field", "no equals", "Hi"],
            ["--key-env", "NO_SUCH_KEY", "Hi"],
            ["--timeline", "/no/such/folder/file", "Hi"],
            ["-n", "0", "Hi"],
            ["--rate", "0", "Hi"],
            ["http://127.0.0.1:1/stream", "--against", "127.0.0.1:2"],
            ["8765", "Hi"],
            ["--stop-after", "1", "Hi"],
            ["--header", "no colon", "Hi"],
            ["--temperature", "nan", "Hi"],
            ["http://127.0.0.1:1/stream", "--against", ""],
            ["http://127.0.0.1:0/stream", "Hi"],
            ["--timeout", "nan", "Hi"],
            ["--leave-after", "-1", "Hi"],
        ],
    )
    def test_usage(self, arguments, capsys):
        with pytest.raises(SystemExit) as exit:
            client.main(arguments)
        assert exit.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert re.search(r"error: .+", err)

    @pytest.mark.parametrize("key", ["hush\nhush", "hush\r"])
    def test_a_key_is_printed_nowhere(self, key, capsys, monkeypatch):
        monkeypatch.setenv("THE_KEY", key)
        with pytest.raises(SystemExit) as exit:
            client.main(["http://127.0.0.1:1/stream", "Hi", "--key-env", "THE_KEY"])
        out, err = capsys.readouterr()
        assert (exit.value.code, out) == (2, "")
        assert "invalid field 'Authorization'" in err
        assert "hush" not in err

    async def test_data_from_stdin_is_read_once(self):
        async with scripted(TWO, TWO) as server:
            process = await start(
                server.url(), "--against", server.url("/b"), "--data", "@-",
                stdin=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, err = await process.communicate(b'{"a": 1}')
            assert (process.returncode, err) == (0, b""), out
            contents = [content for peer in server.peers for _, content in peer.requests]
            assert contents == [b'{"a": 1}', b'{"a": 1}']

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
    @pytest.mark.parametrize("what", [[], ["--json"], ["--timeline", "/dev/full"]])
    async def test_a_full_disk(self, what):
        async with scripted(TWO) as server:
            with Path("/dev/full").open("w") as full:  # noqa: ASYNC230 - it is no file
                process = await start(server.url(), "Hi", *what, stdout=full)
                _, err = await process.communicate()
        assert process.returncode == 1
        assert err == b"client.py: cannot write: No space left on device\n"

    @pytest.mark.skipif(os.name == "nt", reason="a pseudo-terminal is a Unix thing")
    async def test_a_reply_cannot_steer_the_terminal(self):
        import pty

        steering = [head(media_type="text/event-stream"), piece("\x1b[31m\x9bred\x7f\r\n\tok")]
        async with scripted([*steering, DONE]) as server:
            ours, theirs = pty.openpty()
            try:
                process = await start(server.url(), "Hi", stdout=theirs)
                await process.communicate()
                shown = os.read(ours, 1000)
            finally:
                os.close(ours)
                os.close(theirs)
        assert shown == rb"\x1b[31m\x9bred\x7f\r" + b"\r\n\tok\r\n"

    def test_ctrl_c_while_stdin_is_read(self, capsys, monkeypatch):
        class Stdin:
            def read(self):
                raise KeyboardInterrupt

        monkeypatch.setattr(sys, "stdin", Stdin())
        assert client.main(["--data", "@-"]) == 130
        assert capsys.readouterr() == ("", "")

    @pytest.mark.skipif(os.name == "nt", reason="no signal like Ctrl-C to one process")
    async def test_ctrl_c(self):
        async with scripted([*TWO[:2], until_client_ends]) as server:
            process = await start(server.url(), "Hi")
            await process.stdout.readexactly(3)
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
            assert await server.peer.ended == b""
        assert process.returncode == 130
        assert b"Traceback" not in err

    async def test_a_reader_that_has_seen_enough(self):
        go_on = asyncio.Event()
        async with scripted([*TWO[:2], go_on, *TWO[2:]]) as server:
            process = await start(server.url(), "Hi")
            await process.stdout.readexactly(3)
            process._transport.get_pipe_transport(1).close()
            go_on.set()
            err = await process.stderr.read()
            await process.wait()
        assert process.returncode == 1
        assert b"Traceback" not in err
        assert b"Exception" not in err

    def test_runs_on_a_bare_python(self):
        command = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT)!r})",
        ]
        command[-1] += "; import client; client.main(['--help'])"
        result = subprocess.run(command, capture_output=True, check=True, text=True)
        assert "--leave-after" in result.stdout

"""The WebSocket route over real sockets: opening, one reply, stopping, closing, and what is wrong.

Frames and messages themselves are `test_websocket.py`'s; real clients `test_real_clients.py`'s.
"""

import asyncio
import json
from typing import Any

import pytest
from serving import eventually, quick, serving
from sockets import MASK, OPENING, WebClient, open_websocket

import duplex
import websocket
from delivery import Policy
from simulated import SimulatedEngine

SEEDED = {"prompt": "One, two,", "max_tokens": 12, "seed": 7}
ENDLESS = {"prompt": "a", "max_tokens": 1_000_000}


async def log(running: Any) -> list[dict[str, Any]]:
    return (await running.ask("GET", "/log")).json()["requests"]


class TestOpening:
    """RFC 6455 section 4.2; field report 64."""

    @pytest.mark.parametrize(
        "fields",
        [
            {"Connection": "keep-alive, Upgrade", "Upgrade": "WebSocket"},  # Firefox
            {"Connection": "UPGRADE", "Upgrade": "foo, websocket"},
            {"Sec_WebSocket_Extensions": "permessage-deflate; client_max_window_bits"},
            {"Sec_WebSocket_Protocol": "graphql-ws, x"},
        ],
        ids=str,
    )
    async def test_accepted(self, fields: dict[str, str]) -> None:
        async with serving() as running, running.connect() as peer:
            peer.request("GET", "/ws", **(OPENING | fields))
            head, _ = await peer.head()
            assert head.status == 101
            assert head.fields.get("sec-websocket-accept") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
            assert "sec-websocket-extensions" not in head.fields
            assert "sec-websocket-protocol" not in head.fields
            assert "content-length" not in head.fields

    @pytest.mark.parametrize(
        ("method", "changes", "status"),
        [
            ("GET", {"Upgrade": "h2c"}, 426),
            ("GET", {"Connection": "keep-alive"}, 426),
            ("GET", {"Sec_WebSocket_Version": "8"}, 426),
            ("GET", {"Sec_WebSocket_Version": "13, 8"}, 426),
            ("GET", {"Sec_WebSocket_Version": ""}, 426),
            ("GET", {"Sec_WebSocket_Key": ""}, 400),
            ("GET", {"Sec_WebSocket_Key": "abc"}, 400),
            ("GET", {"Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZXg="}, 400),
            ("GET", {"Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ"}, 400),
            ("POST", {}, 405),
            ("PUT", {}, 405),
            ("GET", {"Origin": "http://evil.example"}, 403),
            ("GET", {"Origin": "null"}, 403),
            ("GET", {"Origin": "http://["}, 403),
            ("GET", {"Origin": "http://test.evil.example"}, 403),
        ],
        ids=str,
    )
    async def test_refused(self, method: str, changes: dict[str, str], status: int) -> None:
        """Also field report 65; each refusal can be read, and the connection serves on."""
        async with serving() as running, running.connect() as peer:
            answer = await peer.ask(method, "/ws", **(OPENING | changes))
            assert answer.status == status
            assert answer.json()["error"]["message"]
            if status == 426:
                # RFC 9110 section 15.5.22, RFC 6455 section 4.4.
                assert answer.fields.get("upgrade") == "websocket"
                assert "upgrade" in answer.fields.tokens("connection")
                assert answer.fields.get("sec-websocket-version") == "13"
            assert await log(running) == []
            if method == "GET":
                assert (await peer.ask("GET", "/health")).status == 200

    async def test_a_plain_get(self) -> None:
        async with serving() as running:
            answer = await running.ask("GET", "/ws")
        assert answer.status == 426
        assert answer.fields.get("upgrade") == "websocket"
        assert "WebSocket" in answer.json()["error"]["message"]

    async def test_http_1_0(self) -> None:
        async with serving() as running, running.connect() as peer:
            peer.parser.expect("GET")
            lines = "".join(f"{n.replace('_', '-')}: {v}\r\n" for n, v in OPENING.items())
            peer.send(f"GET /ws HTTP/1.0\r\nHost: x\r\n{lines}\r\n".encode())
            assert (await peer.answer()).status == 400

    @pytest.mark.parametrize("origin", ["http://test", "HTTP://TEST", "https://test"])
    async def test_the_own_origin(self, origin: str) -> None:
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer, Origin=origin)
            web.say(SEEDED)
            assert (await web.reply())[0]

    async def test_an_allowed_origin(self) -> None:
        async with serving(origins=("http://page",)) as running, running.connect() as peer:
            await open_websocket(peer, Origin="http://page")

    async def test_a_request_right_behind_the_opening(self) -> None:
        """The first frames may come with the head, in one read."""
        async with serving() as running, running.connect() as peer:
            client = websocket.Connection(websocket.Side.CLIENT)
            peer.request("GET", "/ws", **OPENING)
            peer.send(client.message(json.dumps(SEEDED)))
            assert (await peer.head())[0].status == 101
            assert (await WebClient(peer).reply())[1]["done"] is True


class TestReply:
    async def test_the_same_text_as_over_http(self) -> None:
        async with serving() as running, running.connect() as peer:
            whole = (await running.ask("POST", "/complete", SEEDED)).json()
            web = await open_websocket(peer)
            web.say(SEEDED)
            text, done = await web.reply()
            assert await web.closed() == 1000
        assert text == whole["text"]
        assert set(done) == {"done", "id", "finish_reason", "usage", "timings"}
        assert done["done"] is True
        assert (done["finish_reason"], done["usage"]) == ("length", whole["usage"])

    async def test_an_error_on_the_way(self) -> None:
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer)
            web.say({**SEEDED, "fail_after": 3})
            text, error = await web.reply()
            assert len(text.split()) == 3
            assert set(error) == {"error"}
            assert {"message", "type"} <= set(error["error"])
            assert await web.closed() == 1000

    async def test_a_request_in_fragments_with_a_ping_between(self) -> None:
        """Field report 56."""
        first, second = json.dumps(SEEDED).encode().split(b"two")
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer)
            web.frame(websocket.TEXT, first + b"two", fin=False)
            web.frame(websocket.PING, b"are you there")
            assert await web.event() == websocket.Pong(b"are you there")
            web.frame(websocket.CONTINUATION, second)
            assert (await web.reply())[1]["usage"]["prompt_tokens"] == 2

    @pytest.mark.parametrize(
        "message",
        ["", "x", "[]", "null", '{"prompt": "a"', "{}", '{"stop": true}', '{"prompt": NaN}',
         '{"prompt": "a", "events": "x"}',
         '{"prompt": "a", "events": "named"}', '{"prompt": "\\ud800"}', "[" * 100_000],
        ids=lambda text: text[:20] or "empty",
    )  # fmt: skip
    async def test_no_request(self, message: str) -> None:
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer)
            peer.send(web.connection.message(message))
            assert (await web.told())["error"]["message"]
            assert await web.closed() is not None
            assert await log(running) == []

    async def test_a_binary_message_is_no_request(self) -> None:
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer)
            peer.send(web.connection.message(json.dumps(SEEDED).encode()))
            assert "text message" in (await web.told())["error"]["message"]
            assert await web.closed() is not None

    async def test_no_request_in_time(self) -> None:
        async with serving(policy=Policy(request_s=0.05)) as running, running.connect() as peer:
            assert await (await open_websocket(peer)).closed() == 1008

    async def test_an_oversized_request(self) -> None:
        """Field report 66: refused by its announced length, before its bytes."""
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer)
            peer.send(b"\x81\xff" + (2**40).to_bytes(8, "big") + MASK)
            assert await web.closed() == 1009

    async def test_fragments_that_add_up_to_an_oversized_request(self) -> None:
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer)
            web.frame(websocket.TEXT, b"a" * 600_000, fin=False)
            web.frame(websocket.CONTINUATION, b"a" * 600_000)
            assert await web.closed() == 1009


class TestStop:
    async def test_in_the_middle(self) -> None:
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer)
            web.say(ENDLESS)
            for _ in range(3):
                await web.told()
            web.say({"stop": True})
            _, done = await web.reply()
            assert (done["done"], done["finish_reason"]) == (True, "cancelled")
            assert await web.closed() == 1000
            assert running.server.engine.running == 0
            (line,) = await log(running)
        assert (line["finish_reason"], line["client_left"]) == ("cancelled", False)

    async def test_before_the_first_token(self) -> None:
        engine = SimulatedEngine(first_delay_ms=3_600_000)
        async with serving(engine) as running, running.connect() as peer:
            web = await open_websocket(peer)
            web.say(SEEDED)
            await eventually(lambda: engine.running == 1)
            web.say({"stop": True})
            text, done = await web.reply()
            assert (text, done["finish_reason"]) == ("", "cancelled")
            assert done["usage"]["completion_tokens"] == 0

    async def test_in_the_same_read_as_the_request(self) -> None:
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer)
            message = web.connection.message
            peer.send(message(json.dumps(ENDLESS)) + message('{"stop": true}'))
            assert (await web.reply())[1]["finish_reason"] == "cancelled"

    async def test_after_the_end(self) -> None:
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer)
            web.say(SEEDED)
            assert (await web.reply())[1]["finish_reason"] == "length"
            web.say({"stop": True})
            assert await web.closed() == 1000

    @pytest.mark.parametrize(
        "message",
        [b'{"stop": true}', '{"stop": false}', '{"stop": 1}', "stop", "[]", '{"prompt": "b"}', ""],
        ids=str,
    )
    async def test_other_messages_change_nothing(self, message: str | bytes) -> None:
        async with serving() as running, running.connect() as peer:
            whole = (await running.ask("POST", "/complete", SEEDED)).json()["text"]
            web = await open_websocket(peer)
            web.say(SEEDED)
            peer.send(web.connection.message(message))
            text, done = await web.reply()
            assert (text, done["finish_reason"]) == (whole, "length")
            assert len(await log(running)) == 2


class TestClosing:
    """RFC 6455 sections 5.5.1 and 7.1; field report 69."""

    @pytest.mark.parametrize("payload", [b"\x03\xe8", b"\x03\xe8bye", b"\x0f\xa0", b""], ids=str)
    async def test_the_client_closes_in_the_middle(self, payload: bytes) -> None:
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer)
            web.say(ENDLESS)
            await web.told()
            web.frame(websocket.CLOSE, payload)
            code = int.from_bytes(payload[:2], "big") if payload else 1005
            while isinstance(event := await web.event(), websocket.Message):
                pass
            assert isinstance(event, websocket.Close)
            assert (event.code, event.reason) == (code, "")
            assert await web.event() is None  # and no message behind the Close
            await eventually(lambda: running.server.engine.running == 0)
            (line,) = await log(running)
        assert (line["finish_reason"], line["client_left"]) == ("cancelled", True)

    async def test_the_client_closes_before_it_asked(self) -> None:
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer)
            web.frame(websocket.CLOSE, b"\x03\xe9")
            event = await web.event()
            assert isinstance(event, websocket.Close)
            assert event.code == 1001
            assert await web.event() is None

    @pytest.mark.parametrize("leave", ["close", "reset", "half_close"])
    @pytest.mark.parametrize("asked", [False, True])
    async def test_the_client_leaves_without_a_word(
        self, leave: str, asked: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer)
            if asked:
                web.say(ENDLESS)
                await web.told()
            getattr(peer, leave)()
            await eventually(lambda: not running.server._connections)
            assert running.server.engine.running == 0
            assert [line["client_left"] for line in await log(running)] == [True] * asked
        assert not caplog.records

    async def test_a_client_that_never_answers_the_close(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(duplex, "CLOSE_S", 0.05)
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer)
            web.say(SEEDED)
            await web.reply()
            assert isinstance(await web.event(), websocket.Close)
            assert await web.event() is None

    async def test_messages_on_the_way_are_read_until_the_close(self) -> None:
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer)
            web.say(SEEDED)
            await web.reply()
            for _ in range(100):
                web.frame(websocket.TEXT, b"x" * 10_000)
            assert await web.closed() == 1000


VIOLATIONS: list[tuple[str, bytes, int]] = [
    ("unmasked", b"\x81\x02hi", 1002),
    ("reserved bit", b"\xc1\x80" + MASK, 1002),
    ("reserved opcode", b"\x83\x80" + MASK, 1002),
    ("reserved control opcode", b"\x8b\x80" + MASK, 1002),
    ("ping in fragments", b"\x09\x80" + MASK, 1002),
    ("ping of 126 bytes", b"\x89\xfe\x00\x7e" + MASK, 1002),
    ("length not minimal", b"\x81\xfe\x00\x05" + MASK, 1002),
    ("length of 64 bits", b"\x81\xff\x80" + bytes(7) + MASK, 1002),
    ("continuation of nothing", b"\x80\x80" + MASK, 1002),
    ("text in the middle of a text", b"\x01\x80" + MASK + b"\x81\x80" + MASK, 1002),
    ("close of one byte", b"\x88\x81" + MASK + b"\x00", 1002),
    ("close with 1005", b"\x88\x82" + MASK + b"\x02\xef", 1002),
    ("close with 999", b"\x88\x82" + MASK + b"\x02\xe5", 1002),
    ("no UTF-8", b"\x81\x81" + MASK + b"\xfe", 1007),
    ("too long", b"\x82\xff" + (2**40).to_bytes(8, "big") + MASK, 1009),
    ("HTTP", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 1002),
]


class TestViolations:
    """Field reports 57 to 63: the connection fails with the right code, and nothing runs on."""

    @pytest.mark.parametrize("when", ["first", "in the middle"])
    @pytest.mark.parametrize(
        ("raw", "code"), [pytest.param(raw, code, id=name) for name, raw, code in VIOLATIONS]
    )
    async def test_violation(
        self, raw: bytes, code: int, when: str,
        caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(duplex, "CLOSE_S", 3600)  # section 7.1.7: it is not waited for
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer)
            if when != "first":
                web.say(ENDLESS)
                await web.told()
            peer.send(raw)
            assert await web.closed() == code
            await eventually(lambda: not running.server._connections)
            assert running.server.engine.running == 0
        assert not caplog.records


class TestPings:
    """RFC 6455 section 5.5.2; field reports 68 and 70."""

    async def test_answered_during_a_reply(self) -> None:
        async with serving() as running, running.connect() as peer:
            web = await open_websocket(peer)
            web.say(ENDLESS)
            await web.told()
            for payload in (b"", b"1", b"x" * 125):
                web.frame(websocket.PING, payload)
                while isinstance(event := await web.event(), websocket.Message):
                    pass
                assert event == websocket.Pong(payload)

    async def test_a_silence_is_broken(self) -> None:
        engine = SimulatedEngine(first_delay_ms=3_600_000)
        async with serving(engine, settings=quick(heartbeat_s=0.02)) as running:
            async with running.connect() as peer:
                web = await open_websocket(peer)
                web.say(SEEDED)
                for _ in range(3):
                    event = await web.event()
                    assert isinstance(event, websocket.Ping)
                    peer.send(web.connection.pong(event.payload))
                assert engine.running == 1

    async def test_who_never_answers_is_gone(self) -> None:
        engine = SimulatedEngine(first_delay_ms=3_600_000)
        settings = quick(heartbeat_s=0.02, stall_s=0.1)
        async with serving(engine, settings=settings) as running, running.connect() as peer:
            web = await open_websocket(peer)
            web.say(SEEDED)
            while await web.event() is not None:
                pass
            await eventually(lambda: engine.running == 0)
            (line,) = await log(running)
        assert (line["finish_reason"], line["client_left"]) == ("cancelled", True)

    async def test_any_word_from_a_client_shows_that_it_is_there(self) -> None:
        """Also while the model is busy: frames are read as they come."""
        engine = SimulatedEngine(first_delay_ms=3_600_000)
        settings = quick(heartbeat_s=0.02, stall_s=0.2)
        async with serving(engine, settings=settings) as running, running.connect() as peer:
            web = await open_websocket(peer)
            web.say(SEEDED)
            for _ in range(30):  # three times as long as silence is borne
                await asyncio.sleep(0.02)
                web.frame(websocket.PONG, b"by itself")
            assert engine.running == 1

    async def test_who_pings_and_never_reads_is_bounded(self) -> None:
        """Field report 67: the answers to pings count like everything else."""
        settings = quick(queued_bytes=100_000, stall_s=0.5)
        async with serving(settings=settings) as running:
            async with running.connect(receive_buffer=4096) as peer:
                web = await open_websocket(peer)
                web.say({**ENDLESS, "stall_after": 0})
                pings = websocket.encode_frame(websocket.PING, b"x" * 125, mask=MASK) * 500

                async def flood() -> None:
                    while True:
                        peer.send(pings)
                        await peer.writer.drain()

                flooding = asyncio.create_task(flood())
                await eventually(lambda: running.server.entries)
                (entry,) = running.server.entries
                await eventually(lambda: entry.generation.finish_reason)
                flooding.cancel()
                assert entry.client_left
                await asyncio.gather(flooding, return_exceptions=True)


async def test_many_at_a_time() -> None:
    async with serving() as running:
        whole = (await running.ask("POST", "/complete", SEEDED)).json()["text"]

        async def one() -> str:
            async with running.connect() as peer:
                web = await open_websocket(peer)
                web.say(SEEDED)
                text, _ = await web.reply()
                assert await web.closed() == 1000
                return text

        texts = await asyncio.gather(*(one() for _ in range(30)))
        assert set(texts) == {whole}
        await eventually(lambda: not running.server._connections)

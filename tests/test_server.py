"""The native routes as a client sees them: what is asked, told, refused, and to whom."""

import asyncio
import json
from typing import Any
from urllib.parse import urlencode

import pytest
from fakes import FakeModel
from serving import Answer, error_of, eventually, serving
from sockets import open_websocket

import http1
from engine import Engine
from simulated import SimulatedEngine

SEEDED = {"prompt": "One, two,", "max_tokens": 12, "seed": 7}
STREAM_FIELDS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
    "transfer-encoding": "chunked",
}


def saying(text: str) -> Engine:
    """An engine whose model says exactly this, whatever the prompt."""
    data = text.encode()
    counts: dict[int, int] = {}

    def script(history: Any) -> int:
        start = counts.setdefault(id(history), len(history))
        position = len(history) - start
        return data[position] if position < len(data) else 256

    return Engine(FakeModel(rows=1, context=4096, script=script))


class TestReplies:
    async def test_complete(self) -> None:
        async with serving() as running:
            answer = await running.ask("POST", "/complete", SEEDED)
        assert answer.status == 200
        assert answer.fields.get("content-type") == "application/json"
        assert "x-accel-buffering" not in answer.fields  # field report 40
        assert set(answer.json()) == {"text", "finish_reason", "usage"}
        assert answer.json()["finish_reason"] == "length"
        assert answer.json()["usage"] == {"prompt_tokens": 2, "completion_tokens": 12}

    @pytest.mark.parametrize("route", ["/complete", "/wait", "/blocking"])
    async def test_other_names_of_complete(self, route: str) -> None:
        async with serving() as running:
            answer = await running.ask("POST", route, SEEDED)
        assert len(answer.json()["text"].split()) == 12

    @pytest.mark.parametrize("method", ["GET", "POST"])
    async def test_stream_head(self, method: str) -> None:
        """Field reports 24 and 40: nothing that a hop could hold back by."""
        target = "/stream" + ("?prompt=a" if method == "GET" else "")
        body = {"prompt": "a"} if method == "POST" else None
        async with serving() as running:
            answer = await running.ask(method, target, body, Accept_Encoding="gzip, br, zstd")
        assert answer.status == 200
        for name, value in STREAM_FIELDS.items():
            assert answer.fields.get_all(name) == [value]
        assert "content-encoding" not in answer.fields

    async def test_the_head_does_not_wait_for_the_first_token(self) -> None:
        """Field report 23."""
        engine = SimulatedEngine(first_delay_ms=3_600_000)
        async with serving(engine) as running, running.connect() as peer:
            peer.request("POST", "/stream", SEEDED)
            head, _ = await peer.head()
            assert head.status == 200
            assert peer.content == b""

    async def test_plain(self) -> None:
        async with serving() as running:
            answer = await running.ask("POST", "/stream", {"prompt": "a", "max_tokens": 3})
        *pieces, end = answer.content.decode().split("\n\n")[:-1]
        assert end == "data: [DONE]"
        for piece in pieces:
            assert list(json.loads(piece.removeprefix("data: "))) == ["text"]
        assert len(pieces) == 3

    async def test_usage(self) -> None:
        async with serving() as running:
            answer = await running.ask("POST", "/stream", {**SEEDED, "usage": True})
        *_, usage, end = answer.events()
        assert end == "[DONE]"
        summary = json.loads(usage)
        assert set(summary) == {"usage", "finish_reason", "timings"}
        assert summary["usage"] == {"prompt_tokens": 2, "completion_tokens": 12}
        assert list(summary["timings"]) == ["queued", "prefill", "first_token", "last_token"]

    async def test_named(self) -> None:
        async with serving() as running:
            answer = await running.ask("POST", "/stream", {**SEEDED, "events": "named"})
        *pieces, end = answer.content.decode().split("\n\n")[:-1]
        assert all(piece.startswith('event: token\ndata: {"text": "') for piece in pieces)
        kind, _, data = end.partition("\n")
        assert kind == "event: done"
        assert json.loads(data.removeprefix("data: "))["finish_reason"] == "length"

    async def test_bare(self) -> None:
        async with serving() as running:
            bare = await running.ask("POST", "/stream", {**SEEDED, "events": "bare"})
            text = (await running.ask("POST", "/complete", SEEDED)).json()["text"]
            whole = await running.ask("POST", "/complete", {**SEEDED, "events": "bare"})
        *pieces, end = bare.events()
        assert end == "[DONE]"
        assert "".join(map(json.loads, pieces)) == text
        assert whole.json() == {"text": text}

    async def test_messages(self) -> None:
        messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": "so kind"}]
        async with serving() as running:
            answer = await running.ask("POST", "/complete", {"messages": messages})
        assert answer.json()["usage"]["prompt_tokens"] == 3

    @pytest.mark.parametrize("events", ["plain", "named", "bare"])
    async def test_the_same_text_however_it_is_delivered(self, events: str) -> None:
        """The same text law: one seed, one text."""
        async with serving() as running:
            whole = (await running.ask("POST", "/complete", SEEDED)).json()["text"]
            queried = await running.ask("GET", f"/complete?{urlencode(SEEDED)}")
            streamed = await running.ask("POST", "/stream", {**SEEDED, "events": events})
            got = await running.ask("GET", f"/stream?{urlencode({**SEEDED, 'events': events})}")
        assert queried.json()["text"] == whole
        assert text_of(streamed) == text_of(got) == whole

    @pytest.mark.parametrize("events", ["plain", "named", "bare"])
    @pytest.mark.parametrize("fault", [{}, {"fail_after": 2}])
    async def test_all_data_is_json(self, events: str, fault: dict[str, int]) -> None:
        """Field report 29: some clients parse every event, so none may be empty."""
        body = {**SEEDED, "events": events, "usage": True, **fault}
        async with serving() as running:
            answer = await running.ask("POST", "/stream", body)
        for block in answer.content.decode().split("\n\n")[:-1]:
            *_, data = block.split("\n")
            assert data == "data: [DONE]" or json.loads(data.removeprefix("data: "))
            assert not block.startswith(("id:", "retry:"))  # field report 27

    async def test_without_a_seed_it_differs(self) -> None:
        body = {"prompt": "a", "max_tokens": 20}
        async with serving() as running:
            texts = [(await running.ask("POST", "/complete", body)).json()["text"] for _ in "ab"]
        assert texts[0] != texts[1]

    async def test_one_token(self) -> None:
        """Field report 111: the token that ends the reply is told too."""
        async with serving() as running:
            for text in ("plain", "named"):
                body = {**SEEDED, "max_tokens": 1, "events": text}
                assert text_of(await running.ask("POST", "/stream", body))


def text_of(answer: Answer) -> str:
    told = [json.loads(data) for data in answer.events() if data != "[DONE]"]
    return "".join(e if isinstance(e, str) else e.get("text", "") for e in told)


AWKWARD = 'a\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r\n\rb\x00\x7f"\\ é 你 \U0001f600 </script>'


class TestText:
    """Field report 39: JSON in one line for every reader, whatever the text."""

    @pytest.mark.parametrize("events", ["plain", "named", "bare"])
    async def test_a_stream(self, events: str) -> None:
        body = {"prompt": "a", "events": events}
        async with serving(saying(AWKWARD)) as running:
            answer = await running.ask("POST", "/stream", body)
        assert text_of(answer) == AWKWARD
        content = answer.content.decode()
        assert content.splitlines() == content.split("\n")[:-1]
        assert "\r" not in content
        assert "é" in content  # and what is harmless is sent as it is

    async def test_a_body(self) -> None:
        async with serving(saying(AWKWARD)) as running:
            answer = await running.ask("POST", "/complete", {"prompt": "a"})
        assert answer.json()["text"] == AWKWARD
        assert len(answer.content.decode().splitlines()) == 1

    async def test_half_a_character_at_the_end(self) -> None:
        """Field report 75: streamed and buffered agree."""
        body = {"prompt": "a", "max_tokens": 2}
        async with serving(saying("a你")) as running:
            whole = (await running.ask("POST", "/complete", body)).json()["text"]
            assert text_of(await running.ask("POST", "/stream", body)) == whole == "a\ufffd"


class TestErrorsAfterTheHead:
    """Field report 33: never an end that could be taken for a good one."""

    async def test_plain(self) -> None:
        async with serving() as running:
            answer = await running.ask("POST", "/stream", {**SEEDED, "fail_after": 5})
        *pieces, error = answer.content.decode().split("\n\n")[:-1]
        assert len(pieces) == 5
        kind, _, data = error.partition("\n")
        assert kind == "event: error"
        assert set(json.loads(data.removeprefix("data: "))) == {"message", "type"}
        assert b"[DONE]" not in answer.content

    async def test_named(self) -> None:
        body = {**SEEDED, "fail_after": 5, "events": "named"}
        async with serving() as running:
            answer = await running.ask("POST", "/stream", body)
        assert b"event: error" in answer.content
        assert b"event: done" not in answer.content

    async def test_a_body_can_still_be_a_500(self) -> None:
        async with serving() as running:
            answer = await running.ask("POST", "/complete", {**SEEDED, "fail_after": 5})
        assert answer.status == 500
        assert error_of(answer)["type"] == "model_error"

    @pytest.mark.parametrize("route", ["/complete", "/stream"])
    async def test_what_fails_before_the_head_is_no_200(
        self, route: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Field report 32: the tokenizer or the chat template."""

        class Broken(FakeModel):
            def encode(self, prompt: Any) -> list[int]:
                raise (ValueError if prompt == "bad" else RuntimeError)("the words of it")

        async with serving(Engine(Broken())) as running:
            answer = await running.ask("POST", route, {"prompt": "bad"})
            assert (answer.status, error_of(answer)["field"]) == (400, "prompt")
            assert not caplog.records
            answer = await running.ask("POST", route, {"prompt": "worse"})
            assert (answer.status, error_of(answer)["message"]) == (500, "internal error")
            assert "the words of it" in caplog.text

    async def test_no_internals(self, caplog: pytest.LogCaptureFixture) -> None:
        model = FakeModel()
        model.fail_decode = lambda: True
        async with serving(Engine(model)) as running:
            answer = await running.ask("POST", "/stream", {"prompt": "a"})
        assert b"a fault in decode" not in answer.content
        assert "a fault in decode" in caplog.text


NOT_A_NUMBER = [True, "5", "0.7", [], {}, float("nan"), float("inf")]
BAD_FIELDS: list[tuple[str, list[Any]]] = [
    # Field reports 85, 95 to 97.
    ("max_tokens", [0, -1, 1.5, 10**18, 1e400, *NOT_A_NUMBER]),
    ("temperature", [-1, -1e-9, 1e9, 2.001, *NOT_A_NUMBER]),
    ("top_k", [-5, 10**9, 0.5, *NOT_A_NUMBER]),
    ("top_p", [0, 1.1, -0.1, *NOT_A_NUMBER]),
    ("repetition_penalty", [0, -1, 100, *NOT_A_NUMBER]),
    ("seed", [-1, 2**64, 0.5, *NOT_A_NUMBER]),
    ("stop", ["", [""], ["a", ""], [1], [None], 5, {}, True, ["a"] * 100, "a" * 10_000]),
    ("events", ["", "Plain", "sse", 1, True, [], ["plain"]]),
    ("usage", [0, 1, "true", "", []]),
    ("prompt", ["", 5, True, [], [""], [[]], {}, ["a"]]),
    (
        "messages",
        [
            [], {}, "a", 5, ["a"], [[]], [{}],
            [{"role": "user"}], [{"content": "a"}],
            [{"role": "user", "content": None}], [{"role": "user", "content": 5}],
            [{"role": "robot", "content": "a"}], [{"role": 5, "content": "a"}],
            [{"role": [], "content": "a"}],
            [{"role": "user", "content": "a", "name": "x"}],
            [{"role": "user", "content": "a"}, None],
        ],
    ),
    ("logit_bias", [{"999999": 5}]),
    ("presence_penalty", [9]),
    ("n", [2]),
    ("stream", [True]),
    ("logprobs", [0, 5, True]),
    ("Prompt", ["a"]),
    ("", ["a"]),
]  # fmt: skip


def asking(name: str, value: Any) -> dict[str, Any]:
    """A request that is right but for one field."""
    return {name: value} if name in ("prompt", "messages") else {"prompt": "a", name: value}


class TestFields:
    """Every field is checked before a stream begins, and refused by its name."""

    @pytest.mark.parametrize(
        ("name", "value"),
        [("events", "named"), ("resume", True), ("garbage_after", 1),
         ("split_at", 1)],
    )  # fmt: skip
    async def test_what_only_a_stream_can_have(self, name: str, value: Any) -> None:
        """Not passed over in silence; what a whole reply has in any case may be asked for."""
        async with serving() as running:
            answer = await running.ask("POST", "/complete", {**SEEDED, name: value})
            assert (answer.status, error_of(answer)["field"]) == (400, name)
            given = {"usage": True, "events": "plain", "flush_tokens": 3, "resume": False}
            assert (await running.ask("POST", "/complete", {**SEEDED, **given})).status == 200

    @pytest.mark.parametrize("route", ["/complete", "/stream"])
    async def test_bad_values(self, route: str) -> None:
        async with serving() as running, running.connect() as peer:
            for name, values in BAD_FIELDS:
                for value in values:
                    answer = await peer.ask("POST", route, asking(name, value))
                    assert answer.status == 400, (name, value)
                    error = error_of(answer)
                    if value == value and value not in (float("inf"), 1e400):
                        assert error["field"] == name, (value, error)
            assert running.server.engine.running == 0
            assert (await peer.ask("POST", route, SEEDED)).status == 200

    async def test_bad_values_over_a_websocket(self) -> None:
        async with serving() as running:
            for name, values in BAD_FIELDS:
                async with running.connect() as peer:
                    web = await open_websocket(peer)
                    web.say(asking(name, values[0]))
                    error = (await web.told())["error"]
                assert error["field"] == name

    @pytest.mark.parametrize(
        ("query", "field"),
        [
            ("", "prompt"),
            ("prompt=", "prompt"),
            ("prompt=a&prompt=b", "prompt"),
            ("prompt=a&max_tokens=5_0", "max_tokens"),
            ("prompt=a&max_tokens=%2B5", "max_tokens"),
            ("prompt=a&max_tokens=+5+5", "max_tokens"),
            ("prompt=a&max_tokens=%D9%A5", "max_tokens"),
            ("prompt=a&max_tokens=0x5", "max_tokens"),
            ("prompt=a&max_tokens=", "max_tokens"),
            ("prompt=a&max_tokens=" + "1" * 5000, "max_tokens"),
            ("prompt=a&temperature=NaN", "temperature"),
            ("prompt=a&temperature=Infinity", "temperature"),
            ("prompt=a&usage=True", "usage"),
            ("prompt=a&usage=1", "usage"),
            ("prompt=a&stop=", "stop"),
            ("prompt=a&events=x", "events"),
            ("prompt=a&nonsense=1", "nonsense"),
            ("prompt=a&seed=%22a", "seed"),
            ("messages=%5B%7B%7D%5D", "messages"),
            ("messages=x", "messages"),
            ("messages=" + "%5B" * 2500, "messages"),
            ("prompt=a&max_tokens=" + "%5B" * 2500, "max_tokens"),
        ],
        ids=lambda text: text[:40],
    )
    async def test_bad_queries(self, query: str, field: str) -> None:
        async with serving() as running:
            for route in ("/complete", "/stream"):
                answer = await running.ask("GET", f"{route}?{query}")
                assert answer.status == 400
                assert error_of(answer)["field"] == field

    async def test_lone_surrogate_in_a_query(self) -> None:
        """Field report 100."""
        messages = urlencode({"messages": '[{"role": "user", "content": "\\ud83d x"}]'})
        async with serving() as running:
            answer = await running.ask("GET", f"/complete?{messages}")
        assert answer.status == 400
        assert "codec" not in error_of(answer)["message"]

    async def test_a_query_that_is_no_utf_8(self) -> None:
        async with serving() as running:
            for query in ("prompt=%ff", "prompt=%", "prompt=%4", "prompt=%zz", "%ff=a"):
                answer = await running.ask("GET", f"/complete?{query}")
                assert answer.status == 400

    async def test_good_queries(self) -> None:
        query = (
            "prompt=a+b%20c&max_tokens=5&temperature=0.5&top_k=3&top_p=0.9&seed=1"
            "&stop=%0A&stop=%E4%BD%A0&repetition_penalty=1.1&usage=true&events=named"
        )
        async with serving() as running:
            answer = await running.ask("GET", f"/stream?{query}")
        assert answer.status == 200
        summary = json.loads(answer.events()[-1])
        assert summary["usage"] == {"prompt_tokens": 3, "completion_tokens": 5}

    async def test_null_is_absent(self) -> None:
        names = ["messages", "max_tokens", "temperature", "top_k", "top_p", "seed", "stop"]
        names += ["repetition_penalty", "events", "usage"]
        async with serving() as running:
            answer = await running.ask("POST", "/complete", {"prompt": "a"} | dict.fromkeys(names))
        assert answer.status == 200

    async def test_stop_forms(self) -> None:
        """Field report 85."""
        async with serving() as running:
            for stop in (None, [], ["x"], "x", ["a", "b", "c", "d", "e"]):
                answer = await running.ask("POST", "/complete", {**SEEDED, "stop": stop})
                assert answer.status == 200

    async def test_both_prompt_and_messages(self) -> None:
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
        async with serving() as running:
            assert (await running.ask("POST", "/stream", body)).status == 400

    async def test_white_space_alone(self) -> None:
        """Field report 97: answered, one way or the other."""
        async with serving() as running:
            assert (await running.ask("POST", "/stream", {"prompt": " \n"})).status in (200, 400)

    async def test_a_prompt_longer_than_the_context(self) -> None:
        """Field report 98: a 400 that names both numbers, before any event."""
        async with serving(Engine(FakeModel(context=64))) as running:
            for route in ("/complete", "/stream"):
                answer = await running.ask("POST", route, {"prompt": "a" * 65})
                assert answer.status == 400
                error = error_of(answer)
                assert "65" in error["message"]
                assert "64" in error["message"]
                assert error["field"] == "prompt"


BAD_CONTENT: list[tuple[str, bytes, int]] = [
    # Field reports 100 and 130.
    ("empty", b"", 400),
    ("no JSON", b"prompt=a", 400),
    ("cut", b'{"prompt": "a"', 400),
    ("more behind", b'{"prompt": "a"} {}', 400),
    ("list", b'["a"]', 400),
    ("string", b'"a"', 400),
    ("null", b"null", 400),
    ("number", b"5", 400),
    ("single quotes", b"{'prompt': 'a'}", 400),
    ("NaN", b'{"prompt": "a", "temperature": NaN}', 400),
    ("-Infinity", b'{"prompt": "a", "top_p": -Infinity}', 400),
    ("NaN in the depth", b'{"prompt": "a", "messages": [{"x": NaN}]}', 400),
    ("name twice", b'{"prompt": "a", "prompt": "b"}', 400),
    ("name twice in the depth", b'{"messages": [{"role": "user", "role": "x"}]}', 400),
    ("lone surrogate", b'{"prompt": "\\ud83d x"}', 400),
    ("lone surrogate as a name", b'{"prompt": "a", "\\udc00": 1}', 400),
    ("lone surrogate in stop", b'{"prompt": "a", "stop": "\\ud83d"}', 400),
    ("bytes of a surrogate", b'{"prompt": "\xed\xa0\x80"}', 400),
    ("no UTF-8", b'{"prompt": "\xff"}', 400),
    ("UTF-16", '{"prompt": "a"}'.encode("utf-16"), 400),
    ("byte order mark", b'\xef\xbb\xbf{"prompt": "a"}', 400),
    ("control character", b'{"prompt": "a\nb"}', 400),
    ("digits without end", b'{"prompt": "a", "seed": ' + b"1" * 100_000 + b"}", 400),
    ("deep lists", b"[" * 100_000, 400),
    ("deep objects", b'{"a":' * 100_000, 400),
    ("deep in a field", b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
    ("10 MB", b'{"prompt": "' + b"a" * 10_000_000 + b'"}', 413),
]


class TestContent:
    async def test_bad_content_leaves_others_alone(self, caplog: pytest.LogCaptureFixture) -> None:
        """Field report 95: while all of it is refused a stream runs on, and ends as it should."""
        engine = SimulatedEngine(delay_ms=1, jitter_ms=0)
        async with serving(engine) as running, running.connect() as other:
            other.request("POST", "/stream", {**SEEDED, "max_tokens": 1_000_000})
            await other.until(b"data: ")
            for name, content, status in BAD_CONTENT:
                for route in ("/complete", "/stream"):
                    answer = await running.ask("POST", route, content)
                    assert answer.status == status, name
                    message = error_of(answer)["message"]
                    assert "sys." not in message, message
            mark = len(other.content)
            while len(other.content) <= mark:
                assert await other.event() is not None
            assert engine.running == 1
        assert not caplog.records

    async def test_a_pair_of_surrogates_is_a_character(self) -> None:
        body = b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}'
        async with serving(Engine(FakeModel())) as running:
            answer = await running.ask("POST", "/complete", body)
        assert answer.json()["usage"]["prompt_tokens"] == 4

    @pytest.mark.parametrize(
        ("media_type", "status"),
        [
            ("application/json", 200),
            ("Application/JSON; charset=UTF-8", 200),
            ("application/x-www-form-urlencoded", 200),  # what curl -d says
            ("text/plain", 400),  # what a page may send to anyone
            ("text/plain; application/json", 400),
            ("multipart/form-data", 400),
            ("application/xml", 400),
        ],
    )
    async def test_media_types(self, media_type: str, status: int) -> None:
        async with serving() as running, running.connect() as peer:
            answer = await peer.ask("POST", "/complete", SEEDED, Content_Type=media_type)
            assert answer.status == status
            assert (await peer.ask("GET", "/health")).status == 200

    async def test_chunked(self) -> None:
        async with serving() as running, running.connect() as peer:
            peer.parser.expect("POST")
            pairs = [("Host", "x"), ("Transfer-Encoding", "chunked")]
            peer.send(http1.encode_request("POST", "/complete", pairs))
            for part in (b'{"prom', b'pt": "a"}', b""):
                peer.send(http1.encode_chunk(part))
            peer.send(http1.LAST_CHUNK)
            assert (await peer.answer()).status == 200

    async def test_content_with_a_coding_is_refused(self) -> None:
        """RFC 9110 section 15.5.16: 415, with the coding that would do."""
        async with serving() as running:
            answer = await running.ask("POST", "/complete", b"\x1f\x8b", Content_Encoding="gzip")
            assert (answer.status, answer.fields.get("accept-encoding")) == (415, "identity")

    async def test_a_long_prompt_holds_nobody_up(self) -> None:
        """Field report 101: it is tokenized off the event loop."""
        import threading

        entered, release = threading.Event(), threading.Event()

        class SlowTokenizer(FakeModel):
            def encode(self, prompt: Any) -> list[int]:
                if len(prompt) > 1000:
                    entered.set()
                    assert release.wait(10)
                return super().encode(prompt)

        async with serving(Engine(SlowTokenizer(context=4096))) as running:
            slow = asyncio.create_task(running.ask("POST", "/complete", {"prompt": "a" * 3000}))
            await eventually(entered.is_set)
            assert (await running.ask("POST", "/complete", {"prompt": "a"})).status == 200
            release.set()
            assert (await slow).status == 200


class TestMethods:
    ROUTES: tuple[tuple[str, str], ...] = (
        ("/complete", "GET, HEAD, OPTIONS, POST"),
        ("/wait", "OPTIONS, POST"),
        ("/blocking", "OPTIONS, POST"),
        ("/stream", "GET, HEAD, OPTIONS, POST"),
        ("/ws", "GET, HEAD, OPTIONS"),
        ("/log", "GET, HEAD, OPTIONS"),
        ("/health", "GET, HEAD, OPTIONS"),
        ("/", "GET, HEAD, OPTIONS"),
    )

    @pytest.mark.parametrize(("route", "allowed"), ROUTES)
    async def test_what_is_allowed(self, route: str, allowed: str) -> None:
        async with serving() as running, running.connect() as peer:
            options = await peer.ask("OPTIONS", route)
            assert (options.status, options.fields.get("allow")) == (204, allowed)
            for method in ("DELETE", "PUT", "PATCH", "TRACE", "get", "QUERY"):
                answer = await peer.ask(method, route)
                assert (answer.status, answer.fields.get("allow")) == (405, allowed)
                error_of(answer)

    @pytest.mark.parametrize("route", [r for r, allowed in ROUTES if "HEAD" in allowed])
    async def test_head(self, route: str) -> None:
        """Field report 10: no content, nothing started, and the next answer is in its place."""
        async with serving() as running, running.connect() as peer:
            target = route + ("?prompt=a" if route in ("/complete", "/stream") else "")
            head = await peer.ask("HEAD", target)
            assert head.content == b""
            got = await peer.ask("GET", target)
            assert (got.status, got.fields.get("content-type")) == (
                head.status,
                head.fields.get("content-type"),
            )
            log = (await peer.ask("GET", "/log")).json()["requests"]
            assert len(log) == (1 if "?" in target else 0)

    @pytest.mark.parametrize(
        "target", ["/nope", "/complete/", "/Complete", "/v2", "//", "/%2e%2e/etc/passwd", "/log%00"]
    )
    async def test_404(self, target: str) -> None:
        async with serving() as running:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE"):
                answer = await running.ask(method, target)
                assert answer.status == 404
                if method != "HEAD":
                    error_of(answer)

    async def test_paths_are_decoded(self) -> None:
        async with serving() as running:
            assert (await running.ask("GET", "/%68ealth?x=y")).status == 200
            assert (await running.ask("GET", "http://test/health")).status == 200
            assert (await running.ask("OPTIONS", "*")).status == 204


class TestLogAndHealth:
    async def test_a_log_line(self) -> None:
        async with serving() as running:
            for route in ("/complete", "/stream"):
                await running.ask("POST", route, SEEDED)
            lines = (await running.ask("GET", "/log")).json()["requests"]
        assert [line["route"] for line in lines] == ["/complete", "/stream"]
        assert len({line["id"] for line in lines}) == 2
        for line in lines:
            assert line["prompt_tokens"] == 2
            assert line["completion_tokens"] == 12
            assert line["finish_reason"] == "length"
            assert line["client_left"] is False
            assert all(isinstance(value, float) for value in line["timings"].values())

    async def test_a_running_one_and_one_whose_client_left(self) -> None:
        engine = SimulatedEngine(delay_ms=1)
        async with serving(engine) as running:
            async with running.connect() as peer:
                peer.request("POST", "/stream", {"prompt": "a", "max_tokens": 1_000_000})
                await peer.until(b"data: ")
                (line,) = (await running.ask("GET", "/log")).json()["requests"]
                assert line["finish_reason"] is None
                peer.close()
                await eventually(lambda: engine.running == 0)
            (line,) = (await running.ask("GET", "/log")).json()["requests"]
        assert (line["finish_reason"], line["client_left"]) == ("cancelled", True)

    async def test_health(self) -> None:
        async with serving(model="some-model") as running:
            answer = await running.ask("GET", "/health")
        assert answer.status == 200
        assert answer.json()["status"] == "ok"
        assert answer.json()["model"] == "some-model"

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    async def test_health_of_a_dead_engine(self) -> None:
        async with serving() as running:
            running.server.engine.failure = "the generation thread died"
            assert (await running.ask("GET", "/health")).status == 503

    async def test_the_first_page(self) -> None:
        async with serving() as running:
            answer = await running.ask("GET", "/")
        assert answer.status == 200
        assert answer.content


class TestFull:
    async def test_429(self) -> None:
        """Field report 108: at once, with Retry-After; who waits is served."""
        import threading

        model = FakeModel(rows=1)
        model.step = threading.Semaphore(0)
        engine = Engine(model, max_waiting=1)
        body = {"prompt": "a", "max_tokens": 2}
        async with serving(engine) as running, running.connect() as a, running.connect() as b:
            a.request("POST", "/complete", body)
            await eventually(lambda: len(model.calls) == 1)
            b.request("POST", "/complete", body)
            await eventually(lambda: engine.waiting == 1)
            for route in ("/complete", "/stream"):
                answer = await running.ask("POST", route, body)
                assert answer.status == 429
                assert answer.fields.get("retry-after")
                error_of(answer)
            model.step.release(1000)
            assert (await a.answer()).status == (await b.answer()).status == 200

    async def test_a_connection_too_many(self) -> None:
        """Its answer is not lost to a reset, though the request was never read."""
        async with serving(max_connections=0) as running, running.connect() as peer:
            peer.request("POST", "/complete", {"prompt": "a" * 500_000})
            answer = await peer.answer()
            assert answer.status == 503
            assert answer.fields.get("retry-after")
            error_of(answer)
            assert await peer.reader.read() == b""

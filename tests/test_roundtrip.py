"""Field report section I, 142 to 155: known bytes at known dates, so that every number is exact.

The wire is a fake whose dates are the script's; what a date is on a real one is `test_client.py`'s.
"""

import gzip
import json
import zlib

import pytest

import contents
import http1
import roundtrip
import sse
import tally
from measures import Failure, Mode, Reply
from roundtrip import RoundTrip
from target import Options, Target
from wire import Failed

HEAD = http1.encode_head(200, [("Content-Type", "text/event-stream")])
DONE = sse.encode("[DONE]")
EOF = b""


class FakeWire:
    """Gives what the script says, at its dates."""

    def __init__(self, script):
        self._script = list(script)
        self.at = 0.0
        self.late = None
        self.received = self.sent = self.reads = 0

    cut = False

    def start_clock(self):
        pass

    def now(self):
        return self.at

    def send(self, data):
        self.sent += len(data)

    def leave(self, how):
        pass

    async def read(self, until):
        at, data = self._script[0] if self._script else (self.at, EOF)
        if until is not None and at > until:
            self.at = until
            return None
        self.at = at
        if self._script:
            del self._script[0]
        self.reads += bool(data)
        self.received += len(data)
        return data


async def replay(*script, dialect="auto", mode=Mode.STREAM, head=HEAD, **more):
    """The reply to a script of (date, bytes); the head comes at 0.1, end-of-file with the last."""
    target = Target.parse("http://x/stream")
    reply = Reply("http://x/stream", mode)
    given = RoundTrip(target, {}, Options(dialect=dialect, mode=mode, **more), reply)
    try:
        await given.run(FakeWire([(0.1, head), *script]))
    except (Failed, http1.ProtocolError, ValueError) as error:
        failure = error.failure if isinstance(error, Failed) else Failure.PROTOCOL
        failure = Failure.TRUNCATED if isinstance(error, http1.Truncated) else failure
        reply.fail(failure, str(error))
    return reply


def chat(**delta):
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def event(record, kind=None):
    return sse.encode(json.dumps(record), event=kind)


def typed(kind, **members):
    return event({"type": kind, **members}, kind)


FINISH = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
ANTHROPIC_BEGIN = (
    typed("message_start", message={"usage": {"input_tokens": 3, "output_tokens": 1}})
    + typed("content_block_start", index=0, content_block={"type": "text", "text": ""})
    + typed("ping")
)
RESPONSES_BEGIN = b"".join(
    typed(f"response.{kind}", response={}, item={}, part={"type": "output_text", "text": ""})
    for kind in ("created", "in_progress", "output_item.added", "content_part.added")
)


def delta(text, kind="text_delta", member="text"):
    return typed("content_block_delta", index=0, delta={"type": kind, member: text})


class TestFirstText:
    @pytest.mark.parametrize(
        ("dialect", "begin", "hi", "end"),
        [
            ("openai", chat(role="assistant", content=""), chat(content="Hi"), FINISH + DONE),
            ("anthropic", ANTHROPIC_BEGIN, delta("Hi"), typed("message_stop")),
            (
                "responses",
                RESPONSES_BEGIN,
                typed("response.output_text.delta", delta="Hi"),
                typed("response.completed", response={"status": "completed"}),
            ),
        ],
    )
    @pytest.mark.parametrize("told", [True, False])
    async def test_142_what_comes_before_text_is_no_text(self, dialect, begin, hi, end, told):
        script = [(0.1, begin), (0.2, b": ping\n\n"), (0.5, hi), (0.6, end)]
        reply = await replay(*script, dialect=dialect if told else "auto")
        assert reply.complete, reply.error
        assert (reply.first_byte, reply.first_text, reply.text) == (0.1, 0.5, "Hi")
        assert reply.first_generated == 0.5
        assert (reply.comments, reply.dialect) == (1, dialect)
        assert reply.end == 0.6

    @pytest.mark.parametrize("nothing", [{"content": None}, {"content": ""}, {}])
    async def test_143_neither_null_nor_empty_nor_absent_is_text(self, nothing):
        script = [(0.2, chat(**nothing)), (0.5, chat(content="Hi")), (0.6, FINISH + DONE)]
        reply = await replay(*script)
        assert (reply.first_text, reply.pieces) == (0.5, ["Hi"])

    @pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
    async def test_144_reasoning_is_generated_and_no_text(self, name):
        thought = chat(**{name: "Hm"})
        reply = await replay((0.3, thought), (2.0, chat(content="Hi")), (2.1, FINISH + DONE))
        assert (reply.first_generated, reply.first_text, reply.text) == (0.3, 2.0, "Hi")
        assert "first generated       300.0 ms (reasoning)" in tally.reply_table(reply)

    async def test_144_only_reasoning(self):
        reply = await replay((0.3, chat(reasoning="Hm")), (0.4, FINISH + DONE))
        assert reply.complete
        assert (reply.first_generated, reply.first_text) == (0.3, None)

    @pytest.mark.parametrize(
        "thought",
        [
            delta("Hm", "thinking_delta", "thinking"),
            delta('{"a"', "input_json_delta", "partial_json"),
            typed("response.reasoning_text.delta", delta="Hm"),
            typed("response.function_call_arguments.delta", delta='{"a"'),
            chat(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": '{"a"'}}]),
        ],
        ids=["thinking", "tool", "reasoning", "arguments", "tool call"],
    )
    async def test_144_thoughts_and_arguments_of_every_dialect(self, thought):
        reply = await replay((0.3, thought))
        assert (reply.first_generated, reply.first_text) == (0.3, None)


class TestLastText:
    async def test_145_usage_finish_and_done_are_no_tokens(self):
        usage = event({"choices": [], "usage": {"completion_tokens": 3}})
        texts = [(at, chat(content=text)) for at, text in ((1.0, "a"), (1.1, "b"), (1.2, "c"))]
        reply = await replay(*texts, (1.5, FINISH), (1.6, usage), (1.7, DONE))
        assert reply.complete
        assert (reply.last_text, reply.end, reply.close) == (1.2, 1.7, 1.7)
        token = reply.time_per_output_token()
        assert (token.seconds, token.count, token.counted) == (pytest.approx(0.1), 3, "usage")
        gaps = reply.gaps()
        assert (gaps.n, gaps.p50, gaps.max) == (2, pytest.approx(0.1), pytest.approx(0.1))

    async def test_148_and_150_an_event_is_not_a_token(self):
        texts = [(1 + n / 10, chat(content="one two")) for n in range(10)]
        usage = event({"choices": [], "usage": {"completion_tokens": 50}})
        counted = await replay(*texts, (2, FINISH + usage + DONE))
        uncounted = await replay(*texts, (2, FINISH + DONE))
        assert counted.time_per_output_token().seconds == pytest.approx(0.9 / 49)
        assert "(50 by usage)" in tally.reply_table(counted)
        assert uncounted.time_per_output_token().seconds == pytest.approx(0.1)
        assert "(10 by events)" in tally.reply_table(uncounted)
        assert "not told; 10 text events" in tally.reply_table(uncounted)

    @pytest.mark.parametrize(
        ("texts", "gaps"), [([], 0), ([(1.0, chat(content="a"))], 0)], ids=["none", "one"]
    )
    async def test_147_and_152_too_few_for_a_quotient(self, texts, gaps):
        reply = await replay(*texts, (2.0, FINISH + DONE))
        assert reply.complete
        assert (reply.time_per_output_token().seconds, reply.gaps().n) == (None, gaps)
        record = json.dumps(tally.reply_record(reply), allow_nan=False)
        assert '"time_per_output_token_s": null' in record
        assert "time per output token n/a" in tally.reply_table(reply)

    async def test_148_usage_counts_reasoning(self):
        """Sent, its time counts; kept by the server, neither its time nor its tokens do."""
        told = {"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 6}}
        usage = event({"choices": [], "usage": told})
        said = [(3.0, chat(content="a")), (3.1, chat(content="b")), (3.2, FINISH + usage + DONE)]
        shown = await replay((1.0, chat(reasoning_content="Hm")), *said)
        assert shown.time_per_output_token().seconds == pytest.approx(2.1 / 8)
        kept = await replay(*said)
        token = kept.time_per_output_token()
        assert (token.seconds, token.count) == (pytest.approx(0.1 / 2), 3)
        assert kept.completion_tokens == 9

    async def test_anthropic_counts_to_the_end(self):
        told = typed("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 9})
        stop = typed("message_stop")
        reply = await replay((1, ANTHROPIC_BEGIN), (2, delta("Hi")), (3, told), (4, stop))
        assert (reply.completion_tokens, reply.finish_reason) == (9, "end_turn")
        assert reply.usage == {"input_tokens": 3, "output_tokens": 9}
        assert reply.pings == 1


class TestEventsAndReads:
    async def test_151_five_events_in_one_read(self):
        reply = await replay((1.0, b"".join(chat(content=c) for c in "abcde")), (2, FINISH + DONE))
        assert [event.at for event in reply.events][:5] == [1.0] * 5
        assert (reply.gaps().n, reply.gaps().max, reply.reads) == (4, 0.0, 3)
        assert "events                7, with text 5, in 3 reads" in tally.reply_table(reply)

    async def test_151_an_event_is_dated_by_the_read_that_completed_it(self):
        hi = chat(content="Hi")
        reply = await replay((1.0, hi[:20]), (1.2, hi[20:-1]), (1.3, hi[-1:]), (2, FINISH + DONE))
        assert (reply.first_byte, reply.first_text) == (0.1, 1.3)

    @pytest.mark.parametrize("bytewise", [True, False])
    async def test_153_every_byte_in_one_class(self, bytewise):
        head = http1.encode_head(
            200, [("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked")]
        )
        body = [chat(content="né"), b": ping\n\n", FINISH + DONE]
        raw = b"".join(map(http1.encode_chunk, body)) + http1.LAST_CHUNK
        parts = [bytes([b]) for b in raw] if bytewise else [raw]
        reply = await replay(*((1.0, part) for part in parts), head=head)
        payload = sum(map(len, body))
        assert (reply.received.head, reply.received.payload) == (len(head), payload)
        assert reply.received.framing == len(raw) - payload
        assert reply.received.total == len(head) + len(raw)
        assert reply.arrivals[-1].content == payload
        assert sum(arrival.size for arrival in reply.arrivals) == reply.received.total

    async def test_events_know_their_size(self):
        reply = await replay((1, event({"text": "né"})), (2, DONE))
        assert [e.size for e in reply.events] == [len('{"text": "n\\u00e9"}'), len("[DONE]")]


NDJSON = http1.encode_head(
    200, [("Content-Type", "application/x-ndjson"), ("Transfer-Encoding", "chunked")]
)


def line(record):
    return http1.encode_chunk(json.dumps(record).encode() + b"\n")


class TestOtherStreams:
    async def test_lines_of_json(self):
        texts = [(1.0, line({"text": "a"})), (1.1, b"1\r\n\n\r\n"), (1.2, line({"text": "b"}))]
        end = line({"done": True, "finish_reason": "stop"}) + http1.LAST_CHUNK
        reply = await replay(*texts, (1.3, end), head=NDJSON)
        assert reply.complete, reply.error
        assert (reply.mode, reply.dialect, reply.text) == ("ndjson", "native", "ab")
        assert (reply.first_text, reply.last_text, reply.end, reply.comments) == (1.0, 1.2, 1.3, 1)

    async def test_lines_cut_anywhere(self):
        raw = b'{"text": "a"}\n{"text": "b"}\n{"text": "c", "done": true}\n'
        script = [(n + 1.0, http1.encode_chunk(raw[n : n + 1])) for n in range(len(raw))]
        reply = await replay(*script, (len(raw) + 1.0, http1.LAST_CHUNK), head=NDJSON)
        assert (reply.complete, reply.pieces) == (True, ["a", "b", "c"])
        assert [e.at for e in reply.events] == [14.0, 28.0, len(raw)]

    async def test_ollama(self):
        told = [
            {"message": {"role": "assistant", "content": "", "thinking": "Hm"}, "done": False},
            {"message": {"role": "assistant", "content": "Hi"}, "done": False},
            {"message": {"content": ""}, "done": True, "done_reason": "stop", "eval_count": 4},
        ]
        script = [(n + 1.0, line(record)) for n, record in enumerate(told)]
        reply = await replay(*script, (4.0, http1.LAST_CHUNK), head=NDJSON)
        assert reply.complete, reply.error
        assert (reply.dialect, reply.text, reply.completion_tokens) == ("ollama", "Hi", 4)
        assert (reply.first_generated, reply.first_text, reply.end) == (1.0, 2.0, 3.0)

    async def test_a_last_line_may_lack_its_line_end(self):
        last = http1.encode_chunk(b'{"text": "a", "done": true}') + http1.LAST_CHUNK
        assert (await replay((1.0, last), head=NDJSON)).complete

    async def test_a_line_that_is_cut(self):
        head = http1.encode_head(200, [("Content-Type", "application/x-ndjson")])
        reply = await replay((1.0, b'{"text": "a"}\n{"te'), head=head)
        assert (reply.failure, reply.text) == (Failure.NO_END_MARKER, "a")

    async def test_plain_chunks(self):
        head = http1.encode_head(
            200, [("Content-Type", "text/plain"), ("Transfer-Encoding", "chunked")]
        )
        snow = "☃".encode()
        texts = [b"Hi ", snow[:1], snow[1:] + b"!", b"{}"]
        script = [(n + 1.0, http1.encode_chunk(text)) for n, text in enumerate(texts)]
        reply = await replay(*script, (6.0, http1.LAST_CHUNK), head=head)
        assert reply.complete, reply.error
        assert (reply.mode, reply.pieces) == ("text", ["Hi ", "☃!", "{}"])
        assert [e.at for e in reply.events] == [1.0, 3.0, 4.0]
        assert (reply.end, reply.close) == (None, 6.0)

    async def test_plain_chunks_that_are_cut(self):
        head = http1.encode_head(
            200, [("Content-Type", "text/plain"), ("Transfer-Encoding", "chunked")]
        )
        reply = await replay((1.0, http1.encode_chunk(b"Hi")), head=head)
        assert (reply.failure, reply.text) == (Failure.TRUNCATED, "Hi")

    async def test_raw_words_as_events(self):
        """What many tutorials stream: `data: word`, though it may look like JSON."""
        script = [(n + 1.0, b"data: " + word + b"\n\n") for n, word in enumerate((b"Two", b"7"))]
        reply = await replay(*script, (3.0, DONE))
        assert (reply.complete, reply.dialect, reply.pieces) == (True, "plain", ["Two", "7"])

    @pytest.mark.parametrize(
        ("script", "dialect", "text"),
        [
            ([event("Two"), DONE], "bare", "Two"),
            ([event({"text": "Two"}), DONE], "native", "Two"),
            ([event({"text": "Two"}, "token"), event({}, "done")], "named", "Two"),
            ([event({"choices": [{"text": "Two"}]}), DONE], "completions", "Two"),
            ([event({"choices": []}), chat(content="Two"), DONE], "openai", "Two"),
        ],
    )
    async def test_the_dialect_is_found(self, script, dialect, text):
        reply = await replay(*((1.0, part) for part in script))
        assert (reply.complete, reply.dialect, reply.text) == (True, dialect, text)
        assert (await replay(*((1.0, p) for p in script), dialect=dialect)).text == text

    @pytest.mark.parametrize(
        ("error", "words"),
        [
            (event({"error": {"message": "quota"}}), "quota"),
            (typed("error", error={"type": "overloaded_error", "message": "quota"}), "quota"),
            (typed("error", code="x", message="quota", param=None), "quota"),
            (typed("response.failed", response={"error": {"message": "quota"}}), "quota"),
            (sse.encode("quota", event="error"), "quota"),
        ],
        ids=["openai", "anthropic", "responses", "responses failed", "words"],
    )
    async def test_an_error_of_every_dialect(self, error, words):
        reply = await replay((1.0, error))
        assert (reply.failure, reply.error, reply.end) == (Failure.IN_BAND, words, 1.0)

    async def test_raw_words_have_an_error_and_an_end_by_type(self):
        words = b"data: Two\n\nevent: ping\ndata: beat\n\n"
        failed = await replay((1.0, words + sse.encode("quota", event="error")))
        ended = await replay((1.0, words + sse.encode("bye", event="done")))
        assert (failed.text, failed.failure, failed.error) == ("Two", Failure.IN_BAND, "quota")
        assert (ended.text, ended.complete, ended.end) == ("Two", True, 1.0)

    async def test_a_foreign_server(self):
        """166: CR LF, no role, no [DONE], an empty `choices`: read, and the end is told apart."""
        parts = [event({"choices": []}), chat(content="Hi"), FINISH]
        script = [(n + 1.0, part.replace(b"\n", b"\r\n")) for n, part in enumerate(parts)]
        reply = await replay(*script)
        assert (reply.complete, reply.text, reply.finish_reason) == (True, "Hi", "stop")
        assert reply.end is None
        cut = await replay(*script[:2])
        assert cut.failure is Failure.NO_END_MARKER


BODIES = {
    "openai": {"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]},
    "completions": {"choices": [{"text": "Hi", "finish_reason": "stop"}]},
    "responses": {"output": [{"content": [{"type": "output_text", "text": "Hi"}]}]},
    "anthropic": {"content": [{"type": "text", "text": "Hi"}], "stop_reason": "end_turn"},
    "ollama": {"message": {"content": "Hi"}, "done": True},
    "native": {"text": "Hi"},
}


@pytest.mark.parametrize("dialect", BODIES)
async def test_whole_replies(dialect):
    content = json.dumps(BODIES[dialect]).encode()
    head = http1.encode_head(
        200, [("Content-Type", "application/json"), ("Content-Length", str(len(content)))]
    )
    reply = await replay((1.0, content), head=head, mode=Mode.JSON)
    assert (reply.complete, reply.dialect, reply.text) == (True, dialect, "Hi"), reply.error
    refused = await replay((1.0, content), head=head)
    assert refused.failure is Failure.NOT_A_STREAM


@pytest.mark.parametrize(
    "content", [b'{"choices": []}', b'{"choices": 7}', b'{"content": 7}', b"7"]
)
async def test_whole_replies_that_are_none(content):
    head = http1.encode_head(200, [("Content-Type", "application/json")])
    reply = await replay((1.0, content), head=head, mode=Mode.JSON)
    assert reply.failure is Failure.NOT_A_REPLY


def raw_deflate():
    return zlib.compressobj(wbits=-15)


class TestCompression:
    @pytest.mark.parametrize(
        ("coding", "compressor"),
        [
            ("gzip", lambda: zlib.compressobj(wbits=31)),
            ("deflate", zlib.compressobj),
            ("deflate", raw_deflate),
        ],
        ids=["gzip", "deflate", "raw deflate"],
    )
    async def test_is_undone_as_it_comes(self, coding, compressor):
        squeeze = compressor()
        script = []
        for at, part in ((1.0, chat(content="a")), (2.0, chat(content="b")), (3.0, FINISH + DONE)):
            data = squeeze.compress(part) + squeeze.flush(zlib.Z_SYNC_FLUSH)
            script.append((at, data))
        script.append((4.0, squeeze.flush()))
        reply = await replay(*script, head=self.head(coding), compressed=True)
        assert reply.complete, reply.error
        assert (reply.pieces, reply.first_text, reply.last_text) == (["a", "b"], 1.0, 2.0)
        assert (reply.coding, reply.end, reply.close) == (coding, 3.0, 4.0)
        assert reply.received.payload == sum(len(data) for _, data in script)
        whole = b"".join(data for _, data in script)
        bytewise = [(1.0, whole[i : i + 1]) for i in range(len(whole))]
        assert (await replay(*bytewise, head=self.head(coding))).pieces == ["a", "b"]

    def head(self, coding):
        return http1.encode_head(
            200, [("Content-Type", "text/event-stream"), ("Content-Encoding", coding)]
        )

    async def test_cut(self):
        squeezed = gzip.compress(chat(content="a") + FINISH + DONE)
        reply = await replay((1.0, squeezed[:-4]), head=self.head("gzip"))
        assert reply.failure is Failure.TRUNCATED

    @pytest.mark.parametrize("coding", ["gzip", "deflate"])
    async def test_what_is_not_compressed(self, coding):
        reply = await replay((1.0, chat(content="a") + DONE), head=self.head(coding))
        assert reply.failure is Failure.PROTOCOL
        assert f"not {coding}" in reply.error

    async def test_a_bomb_is_bounded(self, monkeypatch):
        monkeypatch.setattr(roundtrip, "MAX_REPLY_BYTES", 1_000_000)
        monkeypatch.setattr(contents, "MAX_EVENT_BYTES", 10_000_000)
        bomb = gzip.compress(b": " + b"x" * 50_000_000)
        reply = await replay((1.0, bomb), head=self.head("gzip"))
        assert reply.failure is Failure.PROTOCOL
        assert "exceeds 1000000 bytes" in reply.error


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1E400"])
async def test_a_number_that_no_float_holds_is_none(number):
    usage = b'data: {"usage": {"completion_tokens": %s, "cost": [%s, 1.5]}}\n\n'
    usage %= number.encode(), number.encode()
    reply = await replay((1.0, event({"text": "a"}) + usage + DONE))
    assert reply.complete, reply.error
    assert reply.usage == {"completion_tokens": None, "cost": [None, 1.5]}
    assert reply.completion_tokens is None


async def test_events_are_bounded_in_number(monkeypatch):
    monkeypatch.setattr(roundtrip, "MAX_EVENTS", 1000)
    reply = await replay(*((1.0, event({}) * 300) for _ in range(10)))
    assert reply.failure is Failure.PROTOCOL
    assert "exceeds 1000 events" in reply.error
    assert len(reply.events) == 1000

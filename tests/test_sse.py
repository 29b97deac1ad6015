"""Server-sent events, after the HTML standard sections 9.2.5 and 9.2.6."""

import base64
import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from splits import splits

import sse
from sse import Event, EventTooLong, Parser, encode, encode_comment

CASES = Path(__file__).parents[1] / "../shared/checks/sse_cases.json"


def parse(fragments, **kwargs):
    """Return the parser after all fragments, and its events."""
    parser = Parser(**kwargs)
    return parser, parse_with(parser, fragments)


def parse_with(parser, fragments):
    return [event for fragment in fragments for event in parser.feed(fragment)]


def feed_all(fragments, max_event_bytes):
    """Return the parser, the events, and whether one was too long."""
    parser, events, refused = Parser(max_event_bytes), [], False
    for fragment in [*fragments, b""]:
        try:
            events += parser.feed(fragment)
        except EventTooLong:
            refused = True
    return parser, events, refused


def message(data, id=""):
    return Event("message", data, id)


def load_cases():
    if not CASES.exists():
        why = pytest.mark.skip(reason=f"shared checks absent: {CASES}")
        return [pytest.param(None, marks=why, id="absent")]
    return [pytest.param(case, id=case["name"]) for case in json.loads(CASES.read_text())]


@pytest.mark.parametrize("case", load_cases())
def test_shared_case(case):
    events = [Event(e["type"], e["data"], e["lastEventId"]) for e in case["events"]]
    for fragments in splits(base64.b64decode(case["input_base64"])):
        parser, got = parse(fragments)
        assert got == events
        assert parser.retry in (case["retry"], case.get("retry_alt", case["retry"]))
        assert parser.last_event_id == case["final_id"]


# The tables: (id, raw, events). Each is fed whole, byte by byte, at every cut and at random.

LINE_ENDS = [
    ("lf", b"data: a\n\ndata: b\n\n", [message("a"), message("b")]),
    ("crlf", b"data: a\r\n\r\ndata: b\r\n\r\n", [message("a"), message("b")]),
    ("cr", b"data: a\r\rdata: b\r\r", [message("a"), message("b")]),
    ("crlf-is-one", b"data: a\r\ndata: b\r\n\r\n", [message("a\nb")]),
    ("mixed", b"data: A\r\ndata: B\rdata: C\r\n\n", [message("A\nB\nC")]),
    ("lf-cr-is-two", b"data: a\n\rdata: b\n\r", [message("a"), message("b")]),
    ("lf-after-cr-lf", b"data: a\r\n\ndata: b\n\n", [message("a"), message("b")]),
    ("cr-then-plain", b"data: a\r\rdata: b\n\n", [message("a"), message("b")]),
    ("blank-lines", b"\n\n\r\r\n\r\n\ndata: a\n\n\n\n", [message("a")]),
    ("three-lf", b"data: a\n\n\ndata: b\n\n", [message("a"), message("b")]),
    (
        "only-these-end-a-line",
        'data: {"t":"a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e"}\n\n'.encode(),
        [message('{"t":"a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e"}')],
    ),
]

FIELDS = [
    ("no-space", b"data:x\n\n", [message("x")]),
    ("no-space-anywhere", b"event:t\nid:1\ndata:x\ndata:y\n\n", [Event("t", "x\ny", "1")]),
    ("space-or-none", b"data: w\ndata:x\ndata: y\n\n", [message("w\nx\ny")]),
    ("space-in-value-alone", b"data:x: y\nid:1: 2\n\n", [message("x: y", "1: 2")]),
    ("one-space-taken", b"data:  x\n\n", [message(" x")]),
    ("tab-kept", b"data:\tx\n\n", [message("\tx")]),
    ("no-colon", b"data\n\n", [message("")]),
    ("no-colon-twice", b"data\ndata\n\n", [message("\n")]),
    ("empty-value", b"data:\n\n", [message("")]),
    ("empty-then-text", b"data:\ndata: a\n\n", [message("\na")]),
    ("colon-in-value", b"data: a:b\n\n", [message("a:b")]),
    ("looks-like-separator", b"data: a\ndata: b\n\ndata: c\n\n", [message("a\nb"), message("c")]),
    ("longer-name", b"datax: y\ndata: z\n\n", [message("z")]),
    ("space-before-name", b" data: z\n\n", []),
    ("case-matters", b"Data: z\n\n", []),
    ("comment-inside", b"data: a\n: no\ndata: b\n\n", [message("a\nb")]),
    (
        "event-type",
        b"event: token\ndata: a\n\ndata: b\n\n",
        [Event("token", "a", ""), message("b")],
    ),
    ("event-last-wins", b"event: a\nevent: b\ndata: c\n\n", [Event("b", "c", "")]),
    ("event-without-data", b"event: x\n\ndata: 1\n\n", [message("1")]),
    ("event-emptied", b"event: x\nevent\ndata: 1\n\n", [message("1")]),
]

LAST_EVENT_ID = [
    ("holds", b"id: 1\ndata: a\n\ndata: b\n\n", [message("a", "1"), message("b", "1")]),
    ("after-data", b"data: a\nid: 5\n\n", [message("a", "5")]),
    ("without-data", b"id: 7\n\ndata: a\n\n", [message("a", "7")]),
    ("emptied", b"id: 1\ndata: a\n\nid\ndata: b\n\n", [message("a", "1"), message("b")]),
    (
        "nul-ignored",
        b"id: 1\ndata: a\n\nid: 2\x003\n\ndata: b\n\n",
        [message("a", "1"), message("b", "1")],
    ),
    ("nul-ignored-without-space", b"id:1\nid:\0\ndata:a\n\n", [message("a", "1")]),
]

UTF8 = [
    ("characters", "data: é你😀\n\n".encode(), [message("é你😀")]),
    ("invalid-byte", b"data: a\xffb\n\ndata: c\n\n", [message("a\ufffdb"), message("c")]),
    ("cut-short", b"data: a\xe4\xbd\n\ndata: c\n\n", [message("a\ufffd"), message("c")]),
    ("cut-short-cr", b"data: a\xe4\xbd\r\rdata: c\r\r", [message("a\ufffd"), message("c")]),
    ("cut-short-joined", b"data: \xe4\ndata: \xbd\xa0\n\n", [message("\ufffd\n\ufffd\ufffd")]),
    ("overlong", b"data: \xc0\xaf\n\n", [message("\ufffd\ufffd")]),
    ("surrogate", b"data: \xed\xa0\x80\n\n", [message("\ufffd" * 3)]),
    ("in-type-and-id", b"event: \xff\nid: \xff\ndata: a\n\n", [Event("\ufffd", "a", "\ufffd")]),
]

BYTE_ORDER_MARK = [
    ("one", b"\xef\xbb\xbfdata: 1\n\ndata: 2\n\n", [message("1"), message("2")]),
    ("two", b"\xef\xbb\xbf\xef\xbb\xbfdata: 1\n\ndata: 2\n\n", [message("2")]),
    ("before-crlf", b"\xef\xbb\xbf\r\ndata: 1\n\n", [message("1")]),
    ("later", b"data: 1\n\n\xef\xbb\xbfdata: 2\n\n", [message("1")]),
    ("after-blank", b"\n\xef\xbb\xbfdata: 1\n\n", []),
    ("in-value", b"data: \xef\xbb\xbfx\n\n", [message("\ufeffx")]),
    ("half", b"\xef\xbbdata: 1\n\ndata: 2\n\n", [message("2")]),
]

END_OF_STREAM = [
    ("no-blank-line", b"data: a\n\ndata: b\n", [message("a")]),
    ("no-line-end", b"data: a\n\ndata: b", [message("a")]),
    ("done-unterminated", b"data: [DONE]\n", []),
    ("empty", b"", []),
]

TABLES = {
    "line-ends": LINE_ENDS,
    "fields": FIELDS,
    "last-event-id": LAST_EVENT_ID,
    "utf-8": UTF8,
    "bom": BYTE_ORDER_MARK,
    "end-of-stream": END_OF_STREAM,
}


@pytest.mark.parametrize(
    ("raw", "events"),
    [
        pytest.param(raw, events, id=f"{table}-{name}")
        for table, cases in TABLES.items()
        for name, raw, events in cases
    ],
)
def test_parses_the_same_however_it_is_cut(raw, events):
    for fragments in splits(raw):
        assert parse(fragments)[1] == events, fragments


class TestRetry:
    @pytest.mark.parametrize("value", ["1500", "001500", "0" * 5000 + "1500"])
    def test_digits_are_milliseconds(self, value):
        parser, events = parse([f"retry: {value}\n\n".encode()])
        assert parser.retry == 1500
        assert events == []

    @pytest.mark.parametrize(
        "value", ["", " ", "+5", "-5", "1_0", "5s", " 5", "5 ", "٥", "²", "0x5", "1.5", "9" * 5000]
    )
    def test_anything_else_is_ignored(self, value):
        parser, events = parse([f"retry: 250\nretry: {value}\n\n".encode()])
        assert parser.retry == 250
        assert events == []

    def test_unset(self):
        assert parse([b"data: a\n\n"])[0].retry is None

    @pytest.mark.parametrize("raw", [b"retry: 0\n", b"retry: 000\n"])
    def test_zero(self, raw):
        assert parse([raw])[0].retry == 0


class TestState:
    def test_event_comes_with_the_cr_that_completes_it(self):
        parser = Parser()
        assert parser.feed(b"data: a\r\n\r") == [message("a")]
        assert parser.feed(b"") == []
        assert parser.feed(b"\n") == []
        assert not parser.in_event

    def test_comments_are_counted_and_make_no_event(self):
        for fragments in splits(b": ping\n\n:\r\ndata: a\n:: \n\ndata: b\n\n"):
            parser, events = parse(fragments)
            assert parser.comments == 3
            assert events == [message("a"), message("b")]

    @pytest.mark.parametrize(
        ("raw", "in_event"),
        [
            (b"", False),
            (b"data: a\n\n", False),
            (b": comment\n", False),
            (b"retry: 5\n", False),
            (b"id: 5\n\n", False),
            (b"event: x\n\n", False),
            (b"\xef\xbb", True),
            (b"da", True),
            (b"data: a", True),
            (b"data: a\n", True),
            (b"data: [DONE]\n", True),
            (b"data\n", True),
            (b"event: x\n", True),
            (b"id: 5\n", True),
        ],
    )
    def test_in_event(self, raw, in_event):
        for fragments in splits(raw):
            assert parse(fragments)[0].in_event is in_event

    def test_id_counts_from_the_blank_line_on(self):
        parser, _ = parse([b"id: 1\n\nid: 2\n"])
        assert parser.last_event_id == "1"
        parser.feed(b"\n")
        assert parser.last_event_id == "2"


class TestBound:
    """No event is larger than the bound, none of those before is lost, and none comes after."""

    RAW = b"data: 1\n\ndata: 2\n\ndata: 0123456789\n\ndata: 3\n\n"
    line_ends = pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])

    @line_ends
    def test_same_outcome_however_it_is_cut(self, end):
        for fragments in splits(self.RAW.replace(b"\n", end)):
            parser, events, refused = feed_all(fragments, 16)
            assert events == [message("1"), message("2")]
            assert refused
            assert parser.in_event

    @line_ends
    def test_at_the_bound(self, end):
        for fragments in splits(self.RAW.replace(b"\n", end)):
            assert len(parse(fragments, max_event_bytes=17)[1]) == 4

    @line_ends
    def test_lines_add_up(self, end):
        before = b"data: 1\ndata: 2\n\n"
        for fragments in splits(before + (b"data: 12345" + end) * 3):
            with pytest.raises(EventTooLong):
                parse([*fragments, b""], max_event_bytes=23)
            parse(fragments, max_event_bytes=24)

    def test_lf_that_comes_after_a_long_read_and_its_cr(self):
        read = b"data: 1\r\n\r\n" * 3 + b"data: 2\r"
        assert parse([read, b"\ndata: 3\r\n\r\n"], max_event_bytes=15)[1][3:] == [message("2\n3")]

    def test_events_of_a_large_read_are_bounded_one_by_one(self):
        assert len(parse([b"data: 1\n\n" * 1000], max_event_bytes=10)[1]) == 1000

    def test_comments_and_empty_blocks_are_not_held(self):
        parser, _ = parse([b": ping\n" * 1000 + b"id: 5\n\nevent: x\n\n" * 1000], max_event_bytes=9)
        assert not parser.in_event

    def test_raises_at_once_when_there_is_nothing_to_return(self):
        parser = Parser(max_event_bytes=10)
        for _ in range(3):
            with pytest.raises(EventTooLong, match="10 bytes"):
                parser.feed(b"data: 01234567")

    @pytest.mark.parametrize("read", [b"data: xxxxx\n" * 100, b"x" * 1000], ids=["lines", "line"])
    def test_event_that_never_ends(self, read):
        parser = Parser(max_event_bytes=100_000)
        with pytest.raises(EventTooLong):
            parse_with(parser, [read] * 1000)
        assert len(parser._data) + len(parser._line) <= 100_000 + len(read)


def test_long_line_in_small_reads_costs_linear_time():
    """Quadratic time would take minutes, linear time takes milliseconds."""
    raw = b"data: " + b"x" * 3_000_000 + b"\n\n"
    start = time.process_time()
    _, events = parse(raw[i : i + 1000] for i in range(0, len(raw), 1000))
    assert time.process_time() - start < 1
    assert [len(event.data) for event in events] == [3_000_000]


class TestEncode:
    @pytest.mark.parametrize(
        ("kwargs", "raw"),
        [
            ({"data": '{"text": "Two"}'}, b'data: {"text": "Two"}\n\n'),
            ({"data": ""}, b"data: \n\n"),
            ({"data": " a"}, b"data:  a\n\n"),
            ({"data": ":a"}, b"data: :a\n\n"),
            ({"data": "a\nb\r\nc\rd"}, b"data: a\ndata: b\ndata: c\ndata: d\n\n"),
            ({"data": "a\n"}, b"data: a\ndata: \n\n"),
            ({"data": "\n\r"}, b"data: \ndata: \ndata: \n\n"),
            ({"data": "a\u2028\x85\x0b"}, "data: a\u2028\x85\x0b\n\n".encode()),
            ({"data": "[DONE]", "event": "done"}, b"event: done\ndata: [DONE]\n\n"),
            (
                {"retry": 0, "id": "7", "data": "x", "event": "token"},
                b"event: token\nid: 7\nretry: 0\ndata: x\n\n",
            ),
            ({"data": "x", "id": ""}, b"id: \ndata: x\n\n"),
        ],
    )
    def test_bytes(self, kwargs, raw):
        assert encode(**kwargs) == raw

    @pytest.mark.parametrize(
        "kwargs",
        [
            {"event": "a\nb"},
            {"event": "a\rb"},
            {"id": "a\nb"},
            {"id": "a\r"},
            {"id": "\0"},
            {"retry": -1},
            {"retry": 10**18},
            {"event": "\ud800"},
            {"id": "\udfff"},
        ],
    )
    def test_refuses_what_the_grammar_cannot_carry(self, kwargs):
        with pytest.raises(ValueError, match=r"event|id|retry|surrogates"):
            encode("x", **kwargs)

    def test_refuses_lone_surrogates_in_data(self):
        with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
            encode("\ud83d")

    @pytest.mark.parametrize(
        ("text", "raw"),
        [("", b":\n\n"), ("ping", b": ping\n\n"), ("a\ndata: b\rc", b": a\n: data: b\n: c\n\n")],
    )
    def test_comment(self, text, raw):
        assert encode_comment(text) == raw
        parser, events = parse([raw, b"data: a\n\n"])
        assert events == [message("a")]
        assert parser.comments == raw.count(b"\n") - 1


# Laws

texts = st.text(st.characters(codec="utf-8"))
lines = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"))
ids = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"))
# Bytes that look like the grammar, so that mutations reach its corners.
GRAMMAR = b"data|data: |event:|event: t\n|id: |retry: 5|:| |\r|\n|\n\n|data: x\n\n"
GRAMMAR += b"|\xef\xbb\xbf|\xe4\xbd|\xa0|\xff|\0|x"
tokens = st.sampled_from(GRAMMAR.split(b"|"))
streams = st.lists(tokens | st.binary(max_size=3), max_size=40).map(b"".join)


def newlines(text):
    return text.replace("\r\n", "\n").replace("\r", "\n")


@given(
    st.lists(
        st.fixed_dictionaries(
            {"data": texts},
            optional={"event": lines, "id": ids, "retry": st.integers(0, 10**18 - 1)},
        )
    )
)
@example([{"data": " leading space"}, {"data": ":"}, {"data": "\ufeff", "event": "\ufeff"}])
def test_law_encode_then_parse_is_identity(events):
    last_id, retry, expected = "", None, []
    for event in events:
        last_id, retry = event.get("id", last_id), event.get("retry", retry)
        expected.append(Event(event.get("event") or "message", newlines(event["data"]), last_id))
    parser, got = parse([encode(**event) for event in events])
    assert got == expected
    assert parser.retry == retry
    assert not parser.in_event


@given(streams, st.data())
def test_law_cuts_change_nothing(raw, data):
    parser, events = parse([raw])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=5)))
    fragments = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    for other in fragments, [bytes([byte]) for byte in raw]:
        again, got = parse(other)
        assert got == events
        assert (again.retry, again.comments) == (parser.retry, parser.comments)
        assert (again.last_event_id, again.in_event) == (parser.last_event_id, parser.in_event)


@given(streams)
def test_law_agrees_with_the_standard_word_for_word(raw):
    assert parse([raw])[1] == interpret(raw.decode("utf-8", "replace"))


def interpret(text):
    """Sections 9.2.5 and 9.2.6 on the whole text at once, as slowly as they are written."""
    lines = newlines(text.removeprefix("\ufeff")).split("\n")[:-1]
    events, data, type, id = [], "", "", ""
    for line in lines:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                events.append(Event(type or "message", data.removesuffix("\n"), id))
            data = type = ""
        elif field == "data":
            data += value + "\n"
        elif field == "event":
            type = value
        elif field == "id" and "\0" not in value:
            id = value
    return events


@given(streams)
@example(b"event: a\nid: 1\ndata: b\ndata: c\n\nid: \0\ndata: d\n\n")
def test_law_the_space_after_a_colon_is_optional(raw):
    """What has it takes the short way through the parser, what lacks it the long one."""
    without = re.sub(rb"(?<![^\r\n])([^:\r\n]*): (?! )", rb"\1:", raw)
    for fragments in [without], [bytes([byte]) for byte in without]:
        assert parse(fragments)[1] == parse([raw])[1]


def is_utf8(raw):
    return "\ufffd" not in raw.decode("utf-8", "replace")


@given(streams.filter(is_utf8), st.integers(0, 30))
def test_law_the_bound_is_the_same_however_it_is_cut(raw, bound):
    for fragments in splits(raw):
        assert feed_all(fragments, bound)[1:] == feed_all([raw], bound)[1:]


@given(st.lists(streams), st.integers(0, 30))
def test_law_nothing_is_raised_but_the_bound(fragments, bound):
    parser = Parser(max_event_bytes=bound)
    for fragment in fragments:
        try:
            parser.feed(fragment)
        except EventTooLong:
            assert parser.in_event


def test_bound_default_is_the_documented_constant():
    assert Parser()._max_event_bytes == sse.MAX_EVENT_BYTES

"""RFC 9110 and RFC 9112, one class for each topic."""

import base64
import json
import re
import zlib
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from require import require
from splits import splits

import http1
from http1 import (
    LAST_CHUNK,
    Content,
    End,
    Fields,
    Limits,
    ProtocolError,
    Request,
    RequestParser,
    Response,
    ResponseParser,
    Truncated,
    encode_chunk,
    encode_head,
    encode_request,
    encode_response,
    format_date,
)

CASES = Path(__file__).parents[2] / "shared" / "checks" / "http1_cases.json"

GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: h\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
HOST = Fields([("Host", "h")])


class Refused(int):
    """The status of a violation, at the end of a list of events."""


def drain(parser):
    """Return the events of the bytes fed so far, the last of which may be `Refused`."""
    events = []
    try:
        while (event := parser.next_event()) is not None:
            events.append(event)
    except ProtocolError as error:
        events.append(Refused(error.status))
    return events


def joined(events):
    """Join neighbouring parts of the content, whose cuts depend on how the bytes came."""
    result = []
    for event in events:
        if isinstance(event, Content):
            assert event.data
            if result and isinstance(result[-1], Content):
                event = Content(result.pop().data + event.data)
        result.append(event)
    return result


def accounted(parser):
    """Every byte is counted once: as head, framing or content, or it is still unread."""
    consumed = parser.head_bytes + parser.framing_bytes + parser.content_bytes
    return consumed + len(parser._buffer)


def receive(parser, fragments, eof=False):
    events, fed = [], accounted(parser)
    for fragment in fragments:
        parser.feed(fragment)
        events += drain(parser)
        fed += len(fragment)
        assert accounted(parser) == fed
        if events and isinstance(events[-1], Refused):
            assert drain(parser) == [events[-1]]  # an error stays
            return joined(events)
    if eof:
        parser.feed_eof()
        events += drain(parser)
    return joined(events)


def requests(raw, limits=None, eof=False):
    """Parse `raw` in every split and return the events, which have to be the same for all."""
    first, *others = (receive(RequestParser(limits), parts, eof) for parts in splits(raw))
    for other in others:
        assert other == first
    return first


def responses(raw, *methods, limits=None, eof=False):
    results = []
    for parts in splits(raw):
        parser = ResponseParser(limits)
        for method in methods or ("GET",):
            parser.expect(method)
        results.append(receive(parser, parts, eof))
    for other in results:
        assert other == results[0]
    return results[0]


def table(*rows):
    """Parameters from rows whose first column is the id."""
    return [pytest.param(*row[1:], id=row[0]) for row in rows]


def refusals(*rows):
    """Rows of (section and fault, raw, status): the status is the first and only event."""
    return pytest.mark.parametrize(("raw", "status"), table(*rows))


def head(line):
    return line + b"\r\nHost: h\r\n\r\n"


def with_field(line):
    return b"GET / HTTP/1.1\r\nHost: h\r\n" + line + b"\r\n\r\n"


class TestRequestLine:
    """RFC 9112 section 3."""

    @pytest.mark.parametrize(
        ("line", "method", "target", "version"),
        table(
            ("3-get", b"GET / HTTP/1.1", "GET", "/", (1, 1)),
            ("3-http10", b"GET / HTTP/1.0", "GET", "/", (1, 0)),
            ("9110-2.5-later-minor", b"GET / HTTP/1.7", "GET", "/", (1, 1)),
            ("3.1-method-any-token", b"M-SEARCH!#$%&'*+.^_`|~ / HTTP/1.1", None, "/", (1, 1)),
            ("3.1-method-case", b"get / HTTP/1.1", "get", "/", (1, 1)),
            ("3.1-method-32", b"M" * 32 + b" / HTTP/1.1", "M" * 32, "/", (1, 1)),
            ("3.2.1-query", b"GET /a?b=/?:@!$&'()*+,;=%20-._~ HTTP/1.1", "GET", None, (1, 1)),
            ("3.2.1-empty-segments", b"GET //a//?? HTTP/1.1", "GET", "//a//??", (1, 1)),
            ("3.2.2-absolute", b"GET HTTP://a.b:8/c?d HTTP/1.1", "GET", None, (1, 1)),
            ("3.2.2-absolute-https", b"GET https://[::1]?d HTTP/1.1", "GET", None, (1, 1)),
            ("3.2.3-authority", b"CONNECT h.test:443 HTTP/1.1", "CONNECT", "h.test:443", (1, 1)),
            ("3.2.3-authority-v6", b"CONNECT [::1]:1 HTTP/1.1", "CONNECT", "[::1]:1", (1, 1)),
            ("3.2.4-asterisk", b"OPTIONS * HTTP/1.1", "OPTIONS", "*", (1, 1)),
            ("2.2-empty-lines-before", b"\r\n\r\nGET / HTTP/1.1", "GET", "/", (1, 1)),
        ),
    )
    def test_accepted(self, line, method, target, version):
        written = line.split()
        expected = Request(
            method or written[0].decode(), target or written[1].decode(), HOST, version
        )
        assert requests(head(line)) == [expected, End()]

    @refusals(
        ("3-no-version", head(b"GET /"), 400),
        ("3-version-only", head(b"HTTP/1.1"), 400),
        ("3-two-spaces", head(b"GET  / HTTP/1.1"), 400),
        ("3-space-at-end", head(b"GET / HTTP/1.1 "), 400),
        ("3-space-at-start", head(b" GET / HTTP/1.1"), 400),
        ("3-tabs", head(b"GET\t/\tHTTP/1.1"), 400),
        ("3-space-in-target", head(b"GET /a b HTTP/1.1"), 400),
        ("3-space-line", b"   \r\n\r\n", 400),
        ("3.1-method-no-token", head(b"GE(T / HTTP/1.1"), 400),
        ("3.1-method-empty-line", b"GET\r\n\r\n", 400),
        ("3.1-method-obs-text", head(b"G\xc9T / HTTP/1.1"), 400),
        ("3-method-too-long", head(b"M" * 33 + b" / HTTP/1.1"), 501),
        ("2.3-version-lower-case", head(b"GET / http/1.1"), 400),
        ("2.3-version-no-minor", head(b"GET / HTTP/1"), 400),
        ("2.3-version-two-digits", head(b"GET / HTTP/1.10"), 400),
        ("2.3-version-leading-zero", head(b"GET / HTTP/01.1"), 400),
        ("2.3-version-comma", head(b"GET / HTTP/1,1"), 400),
        ("2.3-version-other-digits", head("GET / HTTP/1.١".encode()), 400),
        ("9110-15.6.6-version-2.0", head(b"GET / HTTP/2.0"), 505),
        ("9110-15.6.6-version-0.9", head(b"GET / HTTP/0.9"), 505),
        ("9113-3.4-preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        ("2.2-bare-lf", b"GET / HTTP/1.1\nHost: h\n\n", 400),
        ("2.2-bare-cr", b"GET / HTTP/1.1\rHost: h\r\r\n", 400),
        ("2.2-lf-first", b"\n" + GET, 400),
        ("2.2-cr-first", b"\r" + GET, 400),
        ("3.2-no-slash", head(b"GET a HTTP/1.1"), 400),
        ("3.2-nul", head(b"GET /\0 HTTP/1.1"), 400),
        ("3.2-del", head(b"GET /\x7f HTTP/1.1"), 400),
        ("3.2-obs-text", head("GET /é HTTP/1.1".encode()), 400),
        ("3.2-fragment", head(b"GET /a#b HTTP/1.1"), 400),
        ("3.2-quote", head(b'GET /?"x" HTTP/1.1'), 400),
        ("3.2-backslash", head(b"GET /a\\b HTTP/1.1"), 400),
        ("3986-2.1-escape-cut", head(b"GET /%4 HTTP/1.1"), 400),
        ("3986-2.1-escape-bad", head(b"GET /?%zz HTTP/1.1"), 400),
        ("3.2.2-other-scheme", head(b"GET ftp://h/ HTTP/1.1"), 400),
        ("9110-4.2.1-empty-host", head(b"GET http:///a HTTP/1.1"), 400),
        ("9110-4.2.1-only-port", head(b"GET http://:80/a HTTP/1.1"), 400),
        ("9110-4.2.4-userinfo", head(b"GET http://u:p@h/ HTTP/1.1"), 400),
        ("3.2.2-bad-host", head(b"GET http://[::g]/ HTTP/1.1"), 400),
        ("3.2.2-fragment", head(b"GET http://h#f HTTP/1.1"), 400),
        ("3.2.3-get", head(b"GET h:443 HTTP/1.1"), 400),
        ("3.2.3-origin", head(b"CONNECT /a HTTP/1.1"), 400),
        ("3.2.3-no-port", head(b"CONNECT h HTTP/1.1"), 400),
        ("9110-9.3.6-empty-port", head(b"CONNECT h: HTTP/1.1"), 400),
        ("9110-9.3.6-port-0", head(b"CONNECT h:0 HTTP/1.1"), 400),
        ("9110-9.3.6-port-65536", head(b"CONNECT h:65536 HTTP/1.1"), 400),
        ("9110-9.3.6-port-long", head(b"CONNECT h:" + b"0" * 5000 + b"80 HTTP/1.1"), 400),
        ("9110-9.3.6-no-host", head(b"CONNECT :443 HTTP/1.1"), 400),
        ("3.2.4-get", head(b"GET * HTTP/1.1"), 400),
        ("3.2.4-connect", head(b"CONNECT * HTTP/1.1"), 400),
    )
    def test_refused(self, raw, status):
        assert requests(raw) == [status]

    @pytest.mark.parametrize(
        ("before", "wrong"),
        table(
            ("a-tls-hello", b"", b"\x16\x03\x01"),
            ("nul", b"", b"\0"),
            ("lf", b"", b"\n"),
            ("cr", b"\r", b"\r"),
            ("no-tchar", b"", b"("),
            ("method-no-tchar", b"GE", b"("),
            ("method-cr", b"GET", b"\r"),
            ("method-too-long", b"M" * 32, b"M"),
            ("request-line-lf", b"GET / HTTP/1.1", b"\n"),
            ("field-lines-lf", b"GET / HTTP/1.1\r\nHost: h\r\n", b"\n"),
            ("no-field-lines-lf", b"GET / HTTP/1.1\r\n", b"\n"),
        ),
    )
    def test_refused_at_the_first_wrong_byte(self, before, wrong):
        parser = RequestParser()
        parser.feed(before)
        assert drain(parser) == []
        parser.feed(wrong[:1])
        assert drain(parser) == [501 if wrong == b"M" else 400]


class TestFieldLines:
    """RFC 9112 section 5, RFC 9110 section 5."""

    @pytest.mark.parametrize(
        ("line", "name", "value"),
        table(
            ("5-plain", b"X-A: v", "X-A", "v"),
            ("5-no-space", b"X-A:v", "X-A", "v"),
            ("5-ows", b"X-A:\t v w \t ", "X-A", "v w"),
            ("9110-5.5-empty", b"X-A:", "X-A", ""),
            ("9110-5.5-blank", b"X-A: \t", "X-A", ""),
            ("9110-5.5-obs-text", b"X-A: caf\xe9 \xff\x80\x85", "X-A", "café ÿ\x80\x85"),
            ("9110-5.5-colon", b"X-A: b: c", "X-A", "b: c"),
            ("9110-5.6.2-every-tchar", b"!#$%&'*+-.^_`|~09azAZ: v", "!#$%&'*+-.^_`|~09azAZ", "v"),
            (
                "9110-5.1-another-field",
                b"Transfer_Encoding: chunked",
                "Transfer_Encoding",
                "chunked",
            ),
        ),
    )
    def test_accepted(self, line, name, value):
        request = Request("GET", "/", Fields([("Host", "h"), (name, value)]))
        assert requests(with_field(line)) == [request, End()]

    @refusals(
        ("5.1-space-before-colon", with_field(b"X-A : v"), 400),
        ("5.1-tab-before-colon", with_field(b"X-A\t: v"), 400),
        ("5.2-obs-fold-space", with_field(b"X-A: v\r\n w"), 400),
        ("5.2-obs-fold-tab", with_field(b"X-A: v\r\n\tw"), 400),
        ("2.2-space-before-first", b"GET / HTTP/1.1\r\n X: v\r\nHost: h\r\n\r\n", 400),
        ("5-empty-name", with_field(b": v"), 400),
        ("5-no-colon", with_field(b"X-A"), 400),
        ("2.2-bare-lf", with_field(b"X-A: v\nX-B: w"), 400),
        ("2.2-bare-cr", with_field(b"X-A: v\rContent-Length: 5"), 400),
        ("2.2-lf-at-end", GET[:-2] + b"\n", 400),
        ("2.2-all-lf", b"GET / HTTP/1.1\r\nHost: h\n\n", 400),
        ("2.2-no-fields-lf", b"GET / HTTP/1.1\r\n\n", 400),
        ("2.2-cr-at-end", b"GET / HTTP/1.1\r\nHost: h\r\r\n\r\n", 400),
        ("9110-5.5-nul", with_field(b"X-A: a\0b"), 400),
        ("9110-5.5-bel", with_field(b"X-A: a\x07b"), 400),
        ("9110-5.5-del", with_field(b"X-A: a\x7fb"), 400),
        ("9110-5.5-vt-around", with_field(b"X-A: \x0bv"), 400),
        *(
            (f"9110-5.6.2-name-{byte:02x}", with_field(b"X%cA: v" % byte), 400)
            for byte in b'\0\t "(),/;<=>?@[\\]{}\x7f\xe9'
        ),
    )
    def test_refused(self, raw, status):
        assert requests(raw) == [status]


class TestFields:
    fields = Fields([("A", "1"), ("B", "x, Y ,,"), ("a", "2"), ("b", "z")])

    def test_order_and_case_are_kept(self):
        assert list(self.fields) == [("A", "1"), ("B", "x, Y ,,"), ("a", "2"), ("b", "z")]
        assert len(self.fields) == 4
        assert not Fields()

    def test_names_in_any_case(self):
        assert self.fields.get("a") == "1"
        assert self.fields.get("C") is None
        assert self.fields.get("c", "0") == "0"
        assert self.fields.get_all("A") == ["1", "2"]
        assert self.fields.get_all("c") == []
        assert "B" in self.fields
        assert "c" not in self.fields

    def test_lists_join_their_lines(self):
        assert self.fields.tokens("B") == ["x", "y", "z"]
        assert self.fields.tokens("c") == []

    def test_without(self):
        assert self.fields.without("A", "c") == Fields([("B", "x, Y ,,"), ("b", "z")])

    def test_values(self):
        same = Fields(iter(list(self.fields)))
        assert same == self.fields
        assert hash(same) == hash(self.fields)
        assert self.fields != list(self.fields)
        assert repr(Fields([("A", "1")])) == "Fields([('A', '1')])"

    def test_what_is_handed_out_is_a_copy(self):
        self.fields.get_all("a").append("3")
        assert self.fields.get_all("a") == ["1", "2"]


class TestHost:
    """RFC 9112 section 3.2, RFC 9110 section 7.2, RFC 3986 section 3.2.2."""

    @pytest.mark.parametrize(
        "host",
        [
            *("conf.test", "conf.test:80", "conf.test:", "", ":80", "127.0.0.1:8765", "UPPER"),
            *("a_b~!$&'()*+,;=", "%C3%A9.test", "xn--9ca.test"),
            *("[::1]", "[::1]:80", "[1:2:3:4:5:6:7:8]", "[::ffff:1.2.3.4]", "[v1.a:b]:1"),
        ],
    )
    def test_valid(self, host):
        raw = b"GET / HTTP/1.1\r\nHost: %b\r\n\r\n" % host.encode()
        request, _ = requests(raw)
        assert request.fields.get("host") == request.host == host

    @pytest.mark.parametrize(
        "host",
        [
            *("bad host", "u@h", "h/", "h?x", "h#x", "a\\b", "h:80:80", "h:+80", "h:x", '"h"'),
            *("[::1", "::1", "[::1]x", "[]", "[::g]", "[1:2]", "[::1%25lo]", "[::1%lo]", "[:::1]"),
            *("[::1.2.3]", "[v1]", "[v.a]", "[vg.a]", "%zz", "%4", "a,[::1]", "h\xe9"),
        ],
    )
    def test_invalid(self, host):
        assert requests(b"GET / HTTP/1.1\r\nHost: %b\r\n\r\n" % host.encode("latin-1")) == [400]

    @refusals(
        ("missing", b"GET / HTTP/1.1\r\n\r\n", 400),
        ("missing-among-others", b"GET / HTTP/1.1\r\nX-A: v\r\n\r\n", 400),
        ("missing-beside-absolute-form", b"GET http://h/ HTTP/1.1\r\n\r\n", 400),
        ("twice", with_field(b"Host: other"), 400),
        ("twice-the-same", with_field(b"hOST: h"), 400),
        ("twice-in-http10", b"GET / HTTP/1.0\r\nHost: h\r\nHost: h\r\n\r\n", 400),
        ("invalid-in-http10", b"GET / HTTP/1.0\r\nHost: a b\r\n\r\n", 400),
    )
    def test_refused(self, raw, status):
        assert requests(raw) == [status]

    def test_http10_needs_none(self):
        request, _ = requests(b"GET / HTTP/1.0\r\n\r\n")
        assert request.host == ""

    def test_an_absolute_form_goes_before_host(self):
        request, _ = requests(b"GET http://a:8/b HTTP/1.1\r\nHost: other\r\n\r\n")
        assert request.host == "a:8"


class TestTarget:
    """What a request makes of its target."""

    @pytest.mark.parametrize(
        ("target", "path", "query"),
        table(
            ("plain", "/a/b", "/a/b", []),
            ("escaped", "/%E4%BD%A0%2F%25+", "/你/%+", []),
            ("asterisk", "*", "*", []),
            ("authority", "h:443", "h:443", []),
            ("absolute", "http://h/a?b=c", "/a", [("b", "c")]),
            ("absolute-no-path", "http://h?b=http://c", "/", [("b", "http://c")]),
            ("origin-like-absolute", "/a://b", "/a://b", []),
            ("pairs", "/?a=1&b=2&a=3", "/", [("a", "1"), ("b", "2"), ("a", "3")]),
            ("empty", "/?", "/", []),
            ("empty-pairs", "/?&a&&=b&c=", "/", [("a", ""), ("", "b"), ("c", "")]),
            ("plus-is-space", "/?a+b=c+%2B+d", "/", [("a b", "c + d")]),
            ("equals", "/?a=b=c", "/", [("a", "b=c")]),
            ("utf-8", "/?q=%E4%BD%A0", "/", [("q", "你")]),
            ("question", "/?a?b", "/", [("a?b", "")]),
        ),
    )
    def test_decoded(self, target, path, query):
        request = Request("GET", target, Fields())
        assert (request.path, request.query) == (path, query)

    @pytest.mark.parametrize("text", ["%ff", "%E4%BD", "%C0%80", "%ED%A0%80", "%", "%4", "%zz"])
    def test_refused(self, text):
        for name, target in (
            ("path", f"/{text}"),
            ("query", f"/?q={text}"),
            ("query", f"/?{text}"),
        ):
            with pytest.raises(ProtocolError, match="request target") as error:
                getattr(Request("GET", target, Fields()), name)
            assert error.value.status == 400


class TestContentLength:
    """RFC 9112 sections 6.2 and 6.3, RFC 9110 section 8.6."""

    @pytest.mark.parametrize(
        ("value", "length"),
        table(
            ("five", b"5", 5),
            ("zero", b"0", 0),
            ("zeros", b"000", 0),
            ("octal-looking", b"0010", 10),
            ("tabs-around", b"\t5\t", 5),
            ("5000-digits", b"0" * 5000 + b"5", 5),
        ),
    )
    def test_accepted(self, value, length):
        content = b"0123456789"[:length]
        events = requests(POST + b"Content-Length: %b\r\n\r\n%b" % (value, content) + GET)
        assert isinstance(events[0], Request)
        assert events[1:-2] == [*([Content(content)] if content else []), End()]
        assert events[-2:] == [Request("GET", "/", HOST), End()]

    @pytest.mark.parametrize(
        "value",
        [
            *(b"-5", b"+5", b"5.0", b"5_0", b"0x5", b"5 5", b"", b"5,", b",5", b"5, 5", b"5, 6"),
            *(b"five", b'"5"', b"5;q=1", "\u0665".encode(), b"\xb2"),  # "\xb2".isdigit() is true
        ],
    )
    def test_invalid(self, value):
        assert requests(POST + b"Content-Length: %b\r\n\r\nhello" % value) == [400]

    @refusals(
        ("6.3-unequal", POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", 400),
        ("6.3-repeated", POST + b"Content-Length: 5\r\ncontent-length: 5\r\n\r\nhello", 400),
        ("5.1-space-before-colon", POST + b"Content-Length : 5\r\n\r\nhello", 400),
        ("5.2-folded", POST + b"Content-Length: 5\r\n 0\r\n\r\nhello", 400),
    )
    def test_refused(self, raw, status):
        assert requests(raw) == [status]

    def test_none_is_none(self):
        parser = RequestParser()
        parser.feed(POST + b"\r\n")
        assert len(drain(parser)) == 2
        assert parser.framing == "none"

    def test_a_body_of_get_is_no_request(self):
        events = requests(with_field(b"Content-Length: 5") + b"hello" + GET)
        assert [type(event) for event in events] == [Request, Content, End, Request, End]

    def test_content_is_given_out_as_it_comes(self):
        parser = RequestParser()
        parser.feed(POST + b"Content-Length: 5\r\n\r\nhe")
        assert drain(parser)[1:] == [Content(b"he")]
        assert parser.framing == "length"
        parser.feed(b"lloGET")
        assert drain(parser) == [Content(b"llo"), End()]
        assert not parser.idle


class TestTransferEncoding:
    """RFC 9112 sections 6.1 and 6.3."""

    @pytest.mark.parametrize(
        "line",
        [
            b"tRANSFER-eNCODING: CHUNKED",
            b"Transfer-Encoding: chunked \t",
            b"Transfer-Encoding: , chunked,,",  # RFC 9110 section 5.6.1.2
        ],
    )
    def test_chunked(self, line):
        events = requests(POST + line + b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n" + GET)
        assert events[1:] == [Content(b"hello"), End(), Request("GET", "/", HOST), End()]

    @pytest.mark.parametrize(
        ("lines", "status"),
        table(
            ("6.3-with-length", b"Transfer-Encoding: chunked\r\nContent-Length: 5", 400),
            ("6.3-length-first", b"Content-Length: 0\r\nTransfer-Encoding: chunked", 400),
            ("6.1-gzip-chunked", b"Transfer-Encoding: gzip, chunked", 501),
            ("6.1-two-lines", b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked", 501),
            ("6.3-not-final", b"Transfer-Encoding: chunked, gzip", 400),
            ("6.3-identity", b"Transfer-Encoding: identity", 400),
            ("6.1-unknown", b"Transfer-Encoding: nonsense", 400),
            ("6.1-twice", b"Transfer-Encoding: chunked, chunked", 400),
            (
                "6.1-twice-in-lines",
                b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
                400,
            ),
            ("7-xchunked", b"Transfer-Encoding: xchunked", 400),
            ("7.1-parameter", b"Transfer-Encoding: chunked;q=1", 400),
            ("7-quoted", b'Transfer-Encoding: "chunked"', 400),
            ("7-empty", b"Transfer-Encoding:", 400),
            ("2.2-vt", b"Transfer-Encoding: \x0bchunked", 400),
            ("2.2-nul", b"Transfer-Encoding: chunked\0", 400),
        ),
    )
    def test_refused(self, lines, status):
        assert requests(POST + lines + b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n") == [status]

    def test_refused_in_http10(self):
        raw = b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        assert requests(raw) == [400]


class TestChunkedCoding:
    """RFC 9112 section 7.1."""

    @pytest.mark.parametrize(
        ("chunks", "content"),
        table(
            ("7.1-one", b"5\r\nhello\r\n", b"hello"),
            ("7.1-two", b"3\r\nhel\r\n2\r\nlo\r\n", b"hello"),
            ("7.1-none", b"", b""),
            ("7.1-lower-hex", b"a\r\n0123456789\r\n", b"0123456789"),
            ("7.1-upper-hex", b"A\r\n0123456789\r\n", b"0123456789"),
            ("7.1-leading-zeros", b"0005\r\nhello\r\n", b"hello"),
            ("7.1-crlf-in-data", b"7\r\na\r\n0\r\nb\r\n", b"a\r\n0\r\nb"),
            ("7.1-tiny", b"1\r\nx\r\n" * 50, b"x" * 50),
            ("7.1.1-extension", b"5;a=b\r\nhello\r\n", b"hello"),
            ("7.1.1-no-value", b"5;a;b\r\nhello\r\n", b"hello"),
            ("7.1.1-bws", b"5 \t; a = b ;\tc\r\nhello\r\n", b"hello"),
            ("7.1.1-quoted", b'5;a="b;\\"\\\\ \xe9\t"\r\nhello\r\n', b"hello"),
            ("7.1.1-quoted-empty", b'5;a=""\r\nhello\r\n', b"hello"),
        ),
    )
    def test_accepted(self, chunks, content):
        events = requests(CHUNKED + chunks + LAST_CHUNK + GET)
        assert events[1:-2] == [*([Content(content)] if content else []), End()]
        assert events[-1] == End()

    @pytest.mark.parametrize("last", [b"0\r\n\r\n", b"000\r\n\r\n", b"0;a=b\r\n\r\n"])
    def test_last_chunk(self, last):
        assert requests(CHUNKED + last)[1:] == [End()]

    @pytest.mark.parametrize(
        ("chunks", "status"),
        table(
            ("7.1-0x", b"0x5\r\nhello\r\n", 400),
            ("7.1-plus", b"+5\r\nhello\r\n", 400),
            ("7.1-minus", b"-5\r\nhello\r\n", 400),
            ("7.1-underscore", b"1_0\r\n0123456789abcdef\r\n", 400),
            ("7.1-no-hex", b"5g\r\nhello\r\n", 400),
            ("7.1-empty", b"\r\nhello\r\n", 400),
            ("7.1-leading-space", b" 5\r\nhello\r\n", 400),
            ("7.1-trailing-space", b"5 \r\nhello\r\n", 400),
            ("7.1-missing", b";a=b\r\nhello\r\n", 400),
            ("7.1-other-digits", "٥\r\nhello\r\n".encode(), 400),
            ("7.1-bare-cr", b"5\rhello\r\n", 400),
            ("7.1-bare-lf", b"5\nhello\r\n", 400),
            ("7.1.1-empty-extension", b"5;\r\nhello\r\n", 400),
            ("7.1.1-empty-value", b"5;a=\r\nhello\r\n", 400),
            ("7.1.1-space-at-end", b"5;a=b \r\nhello\r\n", 400),
            ("7.1.1-cr", b"5;a\rb\r\nhello\r\n", 400),
            ("7.1.1-nul", b"5;a\0b\r\nhello\r\n", 400),
            ("7.1.1-open-quote", b'5;a="b\r\nhello\r\n', 400),
            ("7.1-size-2**64+5", b"10000000000000005\r\nhello\r\n", 413),
            ("7.1-size-long", b"f" * 1000 + b"\r\nhello\r\n", 413),
            ("7.1.1-line-too-long", b"5;a=" + b"b" * 1100 + b"\r\nhello\r\n", 413),
            ("7.1-zeros-too-long", b"0" * 1100 + b"5\r\nhello\r\n", 413),
        ),
    )
    def test_size_refused(self, chunks, status):
        events = requests(CHUNKED + chunks + LAST_CHUNK)
        assert isinstance(events[0], Request)
        assert events[1:] == [status]

    @pytest.mark.parametrize(
        "after",
        [b"XY0\r\n\r\n", b"X\r\n0\r\n\r\n", b"\n0\r\n\r\n", b"\r0\r\n\r\n", b"0\r\n\r\n"],
    )
    def test_data_not_followed_by_crlf(self, after):
        assert requests(CHUNKED + b"5\r\nhello" + after)[1:] == [Content(b"hello"), 400]

    def test_data_too_short(self):
        assert requests(CHUNKED + b"7\r\nhello\r\n0\r\n")[1:] == [Content(b"hello\r\n"), 400]

    def test_extensions_are_bounded_over_the_message(self):
        chunk = b"1;a=" + b"b" * 96 + b"\r\nx\r\n"
        limits = Limits(chunk_excess_bytes=1000)
        events = requests(CHUNKED + chunk * 20, limits)
        assert events[1:] == [Content(b"x" * 10), 413]
        whole = CHUNKED + chunk * 10 + LAST_CHUNK
        assert requests(whole * 2, limits)[1:3] == [Content(b"x" * 10), End()]
        assert requests(whole * 2, limits)[-1] == End()

    def test_data_is_given_out_as_it_comes(self):
        parser = RequestParser()
        parser.feed(CHUNKED + b"5\r\nhe")
        assert drain(parser)[1:] == [Content(b"he")]
        assert parser.framing == "chunked"
        parser.feed(b"llo\r")
        assert drain(parser) == [Content(b"llo")]


class TestTrailers:
    """RFC 9112 section 7.1.2, RFC 9110 section 6.5."""

    def test_kept_apart(self):
        raw = CHUNKED + b"0\r\nX-A: 1\r\nx-b:\t2 \r\n\r\n" + GET
        request, end, *_ = requests(raw)
        assert end == End(Fields([("X-A", "1"), ("x-b", "2")]))
        assert "x-a" not in request.fields

    def test_they_frame_nothing(self):
        trailers = b"Transfer-Encoding: gzip\r\nContent-Length: 9\r\nConnection: close\r\n\r\n"
        request, end, *rest = requests(CHUNKED + b"0\r\n" + trailers + GET)
        assert request.keep_alive
        assert "content-length" in end.trailers
        assert rest == [Request("GET", "/", HOST), End()]

    def test_of_one_message_only(self):
        _, end, _, second = requests(CHUNKED + b"0\r\nX: 1\r\n\r\n" + CHUNKED + LAST_CHUNK)
        assert end.trailers
        assert second == End()

    @pytest.mark.parametrize(
        ("section", "status"),
        table(
            ("5.1-space-before-colon", b"X : v\r\n\r\n", 400),
            ("5.2-obs-fold", b"X: v\r\n w\r\n\r\n", 400),
            ("2.2-bare-lf", b"X: v\n\n", 400),
            ("2.2-lf-at-once", b"\n", 400),
            ("9110-5.5-nul", b"X: \0\r\n\r\n", 400),
            ("6585-5-too-many", b"X: v\r\n" * 101 + b"\r\n", 431),
            ("6585-5-too-large", b"X: " + b"v" * 16384, 431),
        ),
    )
    def test_refused(self, section, status):
        assert requests(CHUNKED + b"0\r\n" + section)[1:] == [status]


class TestLimits:
    """RFC 9110 section 2.3, RFC 6585 section 5: each acts while the bytes arrive."""

    small = Limits(
        target_bytes=10, head_bytes=60, field_count=2, content_bytes=4, chunk_line_bytes=20
    )

    @pytest.mark.parametrize(
        ("raw", "status"),
        table(
            ("target", b"GET /123456789 HTTP/1.1\r\nHost: h\r\n\r\n", None),
            ("target-too-long", b"GET /1234567890 HTTP/1.1\r\nHost: h\r\n\r\n", 414),
            ("target-without-end", b"GET /1234567890", 414),
            ("target-before-grammar", b"GET /\x00234567890", 414),
            ("target-then-line-end", b"GET /1\r\nHost: h1234567890\r\n\r\n", 400),
            ("method-then-target", b"GETGETGETGETGET /1 HTTP/1.1\r\nHost: h\r\n\r\n", None),
            ("head", b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"v" * 28 + b"\r\n\r\n", None),
            ("head-too-large", b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"v" * 29 + b"\r\n\r\n", 431),
            ("head-without-end", b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"v" * 33, 431),
            ("name-without-end", b"GET / HTTP/1.1\r\nHost: h\r\n" + b"X" * 36, 431),
            ("line-without-end", b"GET / " + b"x" * 60, 431),
            ("empty-lines", b"\r\n" * 16 + GET, None),
            ("empty-lines-too-many", b"\r\n" * 17 + GET, 431),
            ("empty-lines-only", b"\r\n" * 31, 431),
            ("fields", b"GET / HTTP/1.1\r\nHost: h\r\nX: 1\r\n\r\n", None),
            ("fields-too-many", b"GET / HTTP/1.1\r\nHost: h\r\nX: 1\r\nX: 2\r\n\r\n", 431),
        ),
    )
    def test_head(self, raw, status):
        events = requests(raw, self.small)
        assert events[0] == status if status else events[-1] == End()

    def test_the_next_head_has_the_whole_limit(self):
        raw = b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"v" * 28 + b"\r\n\r\n"
        assert len(requests(raw * 3, self.small)) == 6

    @pytest.mark.parametrize(
        ("raw", "status"),
        table(
            ("content", b"GET / HTTP/1.1\r\nHost:\r\nContent-Length: 4\r\n\r\nhell", None),
            ("content-too-long", b"GET / HTTP/1.1\r\nHost:\r\nContent-Length: 5\r\n\r\n", 413),
            ("2**64+5", POST + b"Content-Length: 18446744073709551621\r\n\r\n", 413),
        ),
    )
    def test_a_request_is_seen_before_its_content_is_refused(self, raw, status):
        events = requests(raw, Limits(content_bytes=4))
        assert isinstance(events[0], Request)
        assert events[1] == (status or Content(b"hell"))

    def test_a_length_of_thousands_of_digits(self):
        raw = POST + b"Content-Length: " + b"9" * 10_000 + b"\r\n\r\n"
        assert requests(raw)[1:] == [413]
        assert requests(raw, Limits(content_bytes=None))[1:] == [413]

    def test_chunks_add_up(self):
        raw = CHUNKED + b"2\r\nhe\r\n2\r\nll\r\n1\r\no\r\n"
        assert requests(raw, Limits(content_bytes=4))[1:] == [Content(b"hell"), 413]
        assert requests(CHUNKED + b"5\r\n", Limits(content_bytes=4))[1:] == [413]

    def test_without_a_content_limit(self):
        raw = POST + b"Content-Length: 2000000\r\n\r\n"
        assert requests(raw)[1:] == [413]
        assert requests(raw, Limits(content_bytes=None))[1:] == []

    def test_defaults(self):
        target = b"/" + b"a" * 8191
        assert requests(head(b"GET " + target + b" HTTP/1.1"))[-1] == End()
        assert requests(b"GET /" + target) == [414]
        assert requests(head(b"GET " + b"/" * 2**20 + b" HTTP/1.1")) == [414]
        room = 16384 - len(GET) - len(b"X: \r\n")
        assert requests(with_field(b"X: " + b"v" * room))[-1] == End()
        assert requests(with_field(b"X: " + b"v" * (room + 1))) == [431]
        assert requests(with_field(b"X" * 2**20 + b": v")) == [431]
        assert requests(with_field(b"X: v\r\n" * 2000)) == [431]

    def test_a_head_byte_by_byte_is_searched_once(self, monkeypatch):
        """A search that began anew at each byte would look at 64 million bytes."""
        looked_at = 0
        section_end = http1.SECTION_END

        def note(start, end):
            nonlocal looked_at
            looked_at += end - start

        class Buffer(bytearray):
            def find(self, sub, start=0, end=2**63):
                note(start, min(end, len(self)))
                return super().find(sub, start, end)

        class SectionEnd:
            def search(self, buffer, start):
                note(start, len(buffer))
                return section_end.search(buffer, start)

        raw = head(b"GET /" + b"a" * 8000 + b" HTTP/1.1\r\nX: " + b"v" * 8000)
        parser = RequestParser()
        parser._buffer = Buffer()
        monkeypatch.setattr(http1, "SECTION_END", SectionEnd())
        assert len(receive(parser, [raw[i : i + 1] for i in range(len(raw))])) == 2
        assert looked_at < 40 * len(raw)


class TestPersistence:
    """RFC 9112 section 9.3."""

    @pytest.mark.parametrize(
        ("version", "options", "persists"),
        table(
            ("1.1", (1, 1), [], True),
            ("1.1-close", (1, 1), ["close"], False),
            ("1.1-case", (1, 1), ["CLOSE"], False),
            ("1.1-in-a-list", (1, 1), ["keep-alive, Close"], False),
            ("1.1-second-line", (1, 1), ["x-foo", "close"], False),
            ("1.1-other", (1, 1), ["closed"], True),
            ("1.0", (1, 0), [], False),
            ("1.0-keep-alive", (1, 0), ["Keep-Alive"], True),
            ("1.0-both", (1, 0), ["keep-alive, close"], False),
        ),
    )
    def test_keep_alive(self, version, options, persists):
        fields = Fields(("Connection", option) for option in options)
        assert Request("GET", "/", fields, version).keep_alive is persists
        assert Response(200, "", fields, version).keep_alive is persists


class TestExpect:
    """RFC 9110 section 10.1.1."""

    @pytest.mark.parametrize(
        ("version", "value", "expects_continue", "expects_other"),
        table(
            ("none", (1, 1), None, False, False),
            ("continue", (1, 1), "100-continue", True, False),
            ("case", (1, 1), "100-Continue", True, False),
            ("other", (1, 1), "tea", False, True),
            ("both", (1, 1), "100-continue, tea=1", True, True),
            ("ignored-from-1.0", (1, 0), "100-continue", False, False),
        ),
    )
    def test_expectations(self, version, value, expects_continue, expects_other):
        fields = Fields([] if value is None else [("Expect", value)])
        request = Request("POST", "/", fields, version)
        assert request.expects_continue is expects_continue
        assert request.expects_other is expects_other


class TestPulling:
    """Feeding appends, next_event takes out."""

    def test_good_events_come_before_a_violation(self):
        events = requests(GET + POST + b"Content-Length: 2\r\n\r\nhi" + b"\0" + GET)
        assert [type(event) for event in events] == [Request, End, Request, Content, End, Refused]

    def test_a_pipelined_request_waits_until_it_is_asked_for(self):
        parser = RequestParser()
        parser.feed(GET + b"garbage\r\n\r\n")
        assert parser.next_event() == Request("GET", "/", HOST)
        assert parser.next_event() == End()
        assert not parser.idle
        with pytest.raises(ProtocolError, match="invalid method"):
            parser.next_event()

    def test_fifty_pipelined(self):
        assert requests(GET * 50) == [Request("GET", "/", HOST), End()] * 50

    def test_a_crlf_too_many_after_content(self):
        events = requests(POST + b"Content-Length: 2\r\n\r\nhi\r\n" + GET)
        assert events[-2:] == [Request("GET", "/", HOST), End()]

    def test_idle(self):
        parser = RequestParser()
        assert parser.idle
        parser.feed(b"G")
        assert not parser.idle
        assert drain(parser) == []
        assert not parser.idle
        parser.feed(GET[1:])
        parser.next_event()
        assert not parser.idle
        assert parser.next_event() == End()
        assert parser.idle

    @pytest.mark.parametrize("raw", [b"", GET, b"\r\n\r\n", GET + b"\r\n", CHUNKED + LAST_CHUNK])
    def test_end_of_file_between_messages(self, raw):
        parser = RequestParser()
        assert Refused(400) not in receive(parser, [raw], eof=True)
        assert parser.next_event() is None

    def test_end_of_file_in_a_message(self):
        """RFC 9112 section 8: never a success, wherever it is cut."""
        for whole in (
            POST + b"Content-Length: 5\r\n\r\nhello",
            CHUNKED + b"5;a=b\r\nhello\r\n0\r\nX: v\r\n\r\n",
        ):
            for size in range(1, len(whole)):
                parser = RequestParser()
                parser.feed(whole[:size])
                parser.feed_eof()
                events = drain(parser)
                assert events[-1] == Refused(400)
                assert End() not in events
                with pytest.raises(Truncated, match="in the middle of a message"):
                    parser.next_event()

    def test_take_unread(self):
        parser = RequestParser()
        parser.feed(GET + b"\x81\x85frames")
        assert len([parser.next_event(), parser.next_event()]) == 2
        assert parser.take_unread() == b"\x81\x85frames"
        assert parser.take_unread() == b""
        assert parser.idle

    def test_nothing_is_kept_when_everything_is_pulled(self):
        parser = RequestParser(Limits(content_bytes=None))
        parser.feed(CHUNKED + b"100000\r\n")
        for _ in range(16):
            parser.feed(b"x" * 65536)
            drain(parser)
            assert not parser._buffer


def content_of(*parts, trailers=()):
    return [*map(Content, parts), End(Fields(trailers))]


class TestResponses:
    """RFC 9112 sections 4 and 6.3."""

    @pytest.mark.parametrize(
        ("line", "status", "reason", "version"),
        table(
            ("4-plain", b"HTTP/1.1 200 OK", 200, "OK", (1, 1)),
            ("4-long-reason", b"HTTP/1.1 404 Not  Found\t", 404, "Not  Found\t", (1, 1)),
            ("4-empty-reason", b"HTTP/1.1 200 ", 200, "", (1, 1)),
            ("4-no-reason", b"HTTP/1.1 200", 200, "", (1, 1)),
            ("4-obs-text", b"HTTP/1.1 200 d\xe9j\xe0", 200, "déjà", (1, 1)),
            ("2.3-http10", b"HTTP/1.0 200 OK", 200, "OK", (1, 0)),
            ("9110-2.5-later-minor", b"HTTP/1.3 200 OK", 200, "OK", (1, 1)),
            ("9110-15-unknown", b"HTTP/1.1 799 Odd", 799, "Odd", (1, 1)),
        ),
    )
    def test_status_line(self, line, status, reason, version):
        fields = Fields([("Content-Length", "0")])
        expected = [Response(status, reason, fields, version), End()]
        assert responses(line + b"\r\nContent-Length: 0\r\n\r\n") == expected

    @pytest.mark.parametrize(
        "raw",
        [
            pytest.param(b"HTTP/2.0 200 OK\r\n\r\n", id="2.3-version"),
            pytest.param(b"HTTP/1.1  200 OK\r\n\r\n", id="4-two-spaces"),
            pytest.param(b"HTTP/1.1 20 OK\r\n\r\n", id="4-two-digits"),
            pytest.param(b"HTTP/1.1 +20 OK\r\n\r\n", id="4-sign"),
            pytest.param(b"HTTP/1.1 2000 OK\r\n\r\n", id="4-four-digits"),
            pytest.param(b"HTTP/1.1 200 O\0K\r\n\r\n", id="4-nul"),
            pytest.param(b"HTTP/1.1 200 OK\n\n", id="2.2-bare-lf"),
            pytest.param(b"ICY 200 OK\r\n\r\n", id="4-icy"),
            pytest.param(b"\x15\x03\x01", id="a-tls-alert"),
            pytest.param(b"\r\n" + OK, id="2.2-empty-line"),
            pytest.param(OK + b"X : v\r\n\r\n", id="5.1-space-before-colon"),
            pytest.param(OK + b"X: v\n\n", id="2.2-field-bare-lf"),
            pytest.param(OK + b"X: " + b"v" * 65536, id="head-too-large"),
        ],
    )
    def test_refused(self, raw):
        assert responses(raw) == [502]

    @pytest.mark.parametrize(
        ("raw", "methods", "expected", "framing"),
        table(
            ("1-head", OK + b"Content-Length: 5\r\n\r\n", ["HEAD"], [End()], "none"),
            (
                "1-head-chunked",
                OK + b"Transfer-Encoding: chunked\r\n\r\n",
                ["HEAD"],
                [End()],
                "none",
            ),
            ("1-204", b"HTTP/1.1 204 No Content\r\n\r\n", ["GET"], [End()], "none"),
            ("1-304", b"HTTP/1.1 304 x\r\nContent-Length: 5\r\n\r\n", ["GET"], [End()], "none"),
            ("2-connect", OK + b"Content-Length: 5\r\n\r\n", ["CONNECT"], [], "none"),
            (
                "2-connect-refused",
                b"HTTP/1.1 403 x\r\nContent-Length: 1\r\n\r\nx",
                ["CONNECT"],
                content_of(b"x"),
                "length",
            ),
            (
                "4-chunked",
                OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX: v\r\n\r\n",
                ["GET"],
                content_of(b"hi", trailers=[("X", "v")]),
                "chunked",
            ),
            ("6-length", OK + b"Content-Length: 2\r\n\r\nhi", ["GET"], content_of(b"hi"), "length"),
            (
                "5-equal",
                OK + b"Content-Length: 2, 2\r\nContent-Length: 2\r\n\r\nhi",
                ["GET"],
                content_of(b"hi"),
                "length",
            ),
            ("8-close", OK + b"\r\nhi", ["GET"], content_of(b"hi"), "close"),
            ("8-close-empty", OK + b"\r\n", ["GET"], [End()], "close"),
            (
                "8-close-http10",
                b"HTTP/1.0 200 OK\r\n\r\n0\r\n\r\n",
                ["GET"],
                content_of(b"0\r\n\r\n"),
                "close",
            ),
        ),
    )
    def test_framing(self, raw, methods, expected, framing):
        assert responses(raw, *methods, eof=True)[1:] == expected
        parser = ResponseParser()
        parser.expect(methods[0])
        receive(parser, [raw], eof=True)
        assert parser.framing == framing
        assert parser.head_bytes + parser.framing_bytes + parser.content_bytes == len(raw)

    @pytest.mark.parametrize(
        "fields",
        [
            pytest.param(b"Content-Length: 2\r\nContent-Length: 3", id="5-unequal"),
            pytest.param(b"Content-Length: 2, 3", id="5-unequal-list"),
            pytest.param(b"Content-Length: 2, x", id="5-invalid-list"),
            pytest.param(b"Content-Length: -2", id="5-invalid"),
            pytest.param(b"Content-Length:", id="5-empty"),
            pytest.param(b"Content-Length: 2\r\nTransfer-Encoding: chunked", id="3-both"),
            pytest.param(b"Transfer-Encoding: gzip", id="4-not-chunked"),
            pytest.param(b"Transfer-Encoding: gzip, chunked", id="4-unasked"),
        ],
    )
    def test_unsound_framing(self, fields):
        assert responses(OK + fields + b"\r\n\r\n2\r\nhi\r\n0\r\n\r\n") == [502]

    def test_chunked_in_http10(self):
        """RFC 9112 section 6.1: its framing is faulty."""
        raw = b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        assert responses(raw) == [502]

    @pytest.mark.parametrize("size", [b"+2", b"-2", b"0x2", b"2_", b"", b"2 ", b" 2", b"2g"])
    def test_chunk_size_refused(self, size):
        raw = OK + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\nhi\r\n0\r\n\r\n"
        assert responses(raw)[1:] == [502]

    def test_interim(self):
        interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        events = responses(interim + OK + b"Content-Length: 2\r\n\r\nhi")
        assert [getattr(event, "status", None) for event in events] == [100, 103, 200, None, None]
        assert [event.interim for event in events[:3]] == [True, True, False]
        assert events[3:] == content_of(b"hi")

    def test_interim_only(self):
        assert responses(b"HTTP/1.1 100 x\r\n\r\n", eof=True)[1:] == [502]

    @pytest.mark.parametrize(
        ("method", "raw"),
        [("GET", b"HTTP/1.1 101 x\r\nUpgrade: y\r\n\r\n"), ("CONNECT", b"HTTP/1.1 204 x\r\n\r\n")],
    )
    def test_switched(self, method, raw):
        parser = ResponseParser()
        parser.expect(method)
        parser.feed(raw + b"\x81\x02hi")
        assert len(drain(parser)) == 1
        parser.feed_eof()
        assert parser.next_event() is None
        assert parser.head_bytes == len(raw)
        assert parser.take_unread() == b"\x81\x02hi"

    def test_one_response_a_request(self):
        """RFC 9112 section 9.2."""
        first = OK + b"Content-Length: 2\r\n\r\n"
        events = responses(first + first + b"hi" + first, "HEAD", "GET")
        assert [type(event) for event in events] == [Response, End, Response, Content, End, Refused]
        assert receive(ResponseParser(), [b"H"]) == [502]

    def test_idle(self):
        parser = ResponseParser()
        assert parser.idle
        parser.expect("GET")
        assert not parser.idle
        receive(parser, [OK + b"Content-Length: 0\r\n\r\n"])
        assert parser.idle
        parser.feed_eof()
        assert parser.next_event() is None

    @pytest.mark.parametrize(
        ("raw", "content"),
        table(
            ("nothing", b"", []),
            ("status-line", b"HTTP/1.1 2", []),
            ("head", OK + b"X: v\r\n", []),
            ("length", OK + b"Content-Length: 5\r\n\r\nhell", [Content(b"hell")]),
            ("chunk", OK + b"Transfer-Encoding: chunked\r\n\r\n7\r\nFoo", [Content(b"Foo")]),
            (
                "no-last-chunk",
                OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nFoo\r\n",
                [Content(b"Foo")],
            ),
            ("no-end-of-trailers", OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: v\r\n", []),
        ),
    )
    def test_truncated(self, raw, content):
        events = responses(raw, eof=True)
        assert events[-1] == Refused(502)
        assert [event for event in events if isinstance(event, Content)] == content
        parser = ResponseParser()
        parser.expect("GET")
        receive(parser, [raw], eof=True)
        with pytest.raises(Truncated):
            parser.next_event()

    def test_content_limit(self):
        limits = Limits(content_bytes=4)
        for fields, content in (
            (b"\r\n", b"hello"),
            (b"Transfer-Encoding: chunked\r\n\r\n", b"4\r\nhell\r\n1\r\no\r\n"),
        ):
            events = responses(OK + fields + content, limits=limits)
            assert events[1:] == [Content(b"hell"), 502]
        assert responses(OK + b"Content-Length: 5\r\n\r\n", limits=limits)[1:] == [502]
        assert responses(OK + b"\r\nhell", limits=limits, eof=True)[1:] == content_of(b"hell")

    def test_large_heads_and_contents_pass(self):
        raw = OK + b"X: " + b"v" * 40_000 + b"\r\nContent-Length: 3000000\r\n\r\n"
        assert len(responses(raw)) == 1

    def test_counters(self):
        """Every byte is counted once, whole or byte by byte."""
        heads = b"HTTP/1.1 103 x\r\n\r\n" + OK + b"Transfer-Encoding: chunked\r\n\r\n"
        framing = (b"5;a=b\r\n", b"\r\n3\r\n", b"\r\n0\r\nX: v\r\n\r\n")
        raw = heads + framing[0] + b"hello" + framing[1] + b"you" + framing[2]
        for parts in splits(raw):
            parser = ResponseParser()
            parser.expect("GET")
            receive(parser, parts)
            assert parser.head_bytes == len(heads)
            assert parser.framing_bytes == sum(map(len, framing))
            assert parser.content_bytes == len(b"helloyou")


class TestEncoders:
    def test_request(self):
        raw = encode_request("GET", "/a?b", [("Host", "h"), ("X", "é")])
        assert raw == b"GET /a?b HTTP/1.1\r\nHost: h\r\nX: \xe9\r\n\r\n"

    @pytest.mark.parametrize(
        ("method", "fields", "content", "added"),
        table(
            ("9110-8.6-content", "GET", [], b"hi", b"Content-Length: 2\r\n"),
            ("9110-8.6-none-of-get", "GET", [], b"", b""),
            ("9110-8.6-none-of-post", "POST", [], b"", b"Content-Length: 0\r\n"),
            ("framed-by-length", "POST", [("content-length", "9")], b"", b"content-length: 9\r\n"),
            (
                "framed-by-chunks",
                "PUT",
                [("Transfer-Encoding", "chunked")],
                LAST_CHUNK,
                b"Transfer-Encoding: chunked\r\n",
            ),
        ),
    )
    def test_request_length(self, method, fields, content, added):
        raw = encode_request(method, "/", fields, content)
        assert raw == method.encode() + b" / HTTP/1.1\r\n" + added + b"\r\n" + content

    @pytest.mark.parametrize(
        ("method", "target"),
        [
            ("G T", "/"),
            ("", "/"),
            ("G\r\n", "/"),
            ("GÉT", "/"),
            ("GET", "/ a"),
            ("GET", ""),
            ("GET", "/\r\nX: y"),
            ("GET", "/é"),
            ("GET", "/\n"),
        ],
    )
    def test_bad_request_line(self, method, target):
        with pytest.raises(ValueError):
            encode_request(method, target, [])

    def test_response(self):
        raw = encode_response(200, [("X", "y")], b"hi")
        assert raw == b"HTTP/1.1 200 OK\r\nX: y\r\nContent-Length: 2\r\n\r\nhi"
        assert encode_response(404, []) == b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"

    def test_response_to_head(self):
        raw = encode_response(200, [], b"hi", head_only=True)
        assert raw == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"

    @pytest.mark.parametrize("status", [100, 204, 304])
    def test_response_without_content(self, status):
        assert b"Content-Length" not in encode_response(status, [])
        with pytest.raises(ValueError, match="has no content"):
            encode_response(status, [], b"hi")

    def test_head(self):
        raw = encode_head(200, [("Transfer-Encoding", "chunked")])
        assert raw == b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert encode_head(599, ()) == b"HTTP/1.1 599 \r\n\r\n"
        assert encode_head(200, (), "Très bien", (1, 0)) == b"HTTP/1.0 200 Tr\xe8s bien\r\n\r\n"

    def test_reasons_are_those_of_rfc_9110(self):
        assert encode_head(413, ()).startswith(b"HTTP/1.1 413 Content Too Large\r\n")
        assert encode_head(422, ()).startswith(b"HTTP/1.1 422 Unprocessable Content\r\n")

    @pytest.mark.parametrize(
        ("status", "reason"),
        [(99, "x"), (1000, "x"), (200, "a\r\nX: y"), (200, "a\0"), (200, "你")],
    )
    def test_bad_status_line(self, status, reason):
        with pytest.raises(ValueError):
            encode_head(status, (), reason)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(
                ("X", value)
                for value in ("a\r\nEvil: 1", "a\n", "a\r", "a\0", "\x7f", "\x0b", "你")
            ),
            *((name, "v") for name in ("", "a b", "a:", "a\r\n", "é", "你", "a\n")),
        ],
    )
    def test_no_field_can_be_injected(self, name, value):
        for encode in (
            lambda fields: encode_head(200, fields),
            lambda fields: encode_response(200, fields),
            lambda fields: encode_request("GET", "/", fields),
        ):
            with pytest.raises(ValueError):
                encode([(name, value)])

    def test_contradicting_framing(self):
        pairs = [("Content-Length", "1"), ("transfer-encoding", "chunked")]
        for fields in (pairs, pairs[:1] * 2):
            with pytest.raises(ValueError, match="more than one field frames"):
                encode_head(200, fields)

    def test_chunks(self):
        assert encode_chunk(b"hello world!") == b"c\r\nhello world!\r\n"
        assert encode_chunk(b"") == b""
        assert LAST_CHUNK == b"0\r\n\r\n"

    @given(st.integers(0, 253402300799))
    @example(784111777)  # the RFC's: Sun, 06 Nov 1994 08:49:37 GMT
    def test_date(self, seconds):
        """RFC 9110 section 5.6.7."""
        moment = datetime.fromtimestamp(seconds, UTC)
        assert format_date(seconds) == format_datetime(moment, usegmt=True)
        assert format_date(seconds + 0.9) == format_date(seconds)


TOKENS = st.text("!#$%&'*+-.^_`|~09azAZ", min_size=1, max_size=20)
VALUES = st.text(
    st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=40
).map(lambda text: text.strip(" \t"))
FIELDS = st.lists(st.tuples(TOKENS, VALUES), max_size=8)
SEEDS = [
    GET,
    POST + b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\nhello",
    CHUNKED + b'5;a="b"\r\nhello\r\n0\r\nX: v\r\n\r\n',
    b"GET http://[::1]:80/a%20b?c=d HTTP/1.0\r\nHost: h\r\nConnection: keep-alive\r\n\r\n",
    b"HTTP/1.1 103 x\r\n\r\n" + OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    OK + b"Content-Length: 2\r\n\r\nhi",
    b"HTTP/1.0 200\r\n\r\nhi",
]
PIECES = [
    b"\r",
    b"\n",
    b"\r\n",
    b"\0",
    b" ",
    b"\t",
    b":",
    b";",
    b"0",
    b"-",
    b"\xff",
    b"chunked",
    b"1.1",
]


@st.composite
def mutated(draw, seeds=tuple(SEEDS)):
    """A sound message, of which a few bytes are replaced, removed or added."""
    raw = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(raw)))
        end = min(len(raw), start + draw(st.integers(0, 3)))
        raw = raw[:start] + draw(st.sampled_from(PIECES) | st.binary(max_size=3)) + raw[end:]
    return raw


class TestLaws:
    @given(st.binary(max_size=200) | mutated())
    def test_nothing_but_a_protocol_error(self, raw):
        """`receive` would let any other exception pass, and `drain` asks again after an error."""
        for event in requests(raw, eof=True):
            if isinstance(event, Request):
                try:
                    assert isinstance(event.path, str)
                    assert isinstance(event.query, list)
                except ProtocolError:
                    pass
        responses(raw, "GET", "HEAD", eof=True)

    @given(TOKENS, FIELDS, st.binary(max_size=100))
    def test_encode_then_parse_a_request(self, method, fields, content):
        fields = [("Host", "h"), *fields]
        raw = encode_request(method, "/", fields, content)
        if content:
            fields.append(("Content-Length", str(len(content))))
        expected = [Request(method, "/", Fields(fields)), *([Content(content)] if content else [])]
        parser = RequestParser()
        assert receive(parser, [raw, raw]) == [*expected, End()] * 2
        assert parser.head_bytes + parser.content_bytes == 2 * len(raw)

    @given(
        st.integers(200, 999).filter(lambda status: status not in (204, 304)),
        VALUES,
        FIELDS,
        st.lists(st.binary(max_size=20), max_size=5),
    )
    def test_encode_then_parse_a_response(self, status, reason, fields, pieces):
        fields = [*fields, ("Transfer-Encoding", "chunked")]
        raw = encode_head(status, fields, reason) + b"".join(map(encode_chunk, pieces)) + LAST_CHUNK
        parser = ResponseParser()
        parser.expect("GET")
        content = b"".join(pieces)
        expected = [
            Response(status, reason, Fields(fields)),
            *([Content(content)] if content else []),
        ]
        assert receive(parser, [raw]) == [*expected, End()]


def our_messages(raw):
    """The complete requests up to one that ends the connection or is refused."""
    messages, content = [], b""
    for event in receive(RequestParser(), [raw]):
        match event:
            case Request():
                request, content = event, b""
            case Content():
                content += event.data
            case End():
                fields = [(name.lower(), value) for name, value in request.fields]
                messages.append((request.method, request.target, fields, content))
                if not request.keep_alive or request.version == (1, 0):  # h11 ends 1.0 always
                    break
    return messages


def h11_messages(raw):
    h11 = require("h11")
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(raw)
    messages, content = [], b""
    try:
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            match event:
                case h11.Request():
                    request, content = event, b""
                case h11.Data():
                    content += event.data
                case h11.EndOfMessage():
                    fields = [
                        (n.decode("latin-1"), v.decode("latin-1")) for n, v in request.headers
                    ]
                    target = request.target.decode()
                    messages.append((request.method.decode(), target, fields, content))
                    connection.send(h11.Response(status_code=204, headers=[]))
                    connection.send(h11.EndOfMessage())
                    if connection.our_state is h11.DONE:
                        connection.start_next_cycle()
    except h11.RemoteProtocolError:
        pass
    return messages


class TestOracle:
    """What is accepted here is the same to h11, which accepts more."""

    def test_seeds(self):
        for raw in SEEDS[:4]:
            assert our_messages(raw) == h11_messages(raw)
            assert len(our_messages(raw)) == 1

    @settings(max_examples=300)
    @given(mutated(seeds=tuple(SEEDS[:4])))
    def test_mutations(self, raw):
        # h11 refuses what RFC 9112 section 2.2 and RFC 9110 sections 5.6.1.2 and 5.6.3 ask for:
        # an empty line before a request, empty members of a list, white space in an extension.
        assume(not re.search(rb"^\r\n|,|[ \t];", raw))
        ours = our_messages(raw)
        assert ours == h11_messages(raw)[: len(ours)]


def shared_cases():
    if not CASES.exists():
        reason = "../shared/checks/http1_cases.json is not here"
        return [pytest.param({}, marks=pytest.mark.skip(reason=reason))]
    return [pytest.param(case, id=case["name"]) for case in json.loads(CASES.read_text())]


class TestSharedCases:
    """The conformance cases as far as a parser decides them, at their strict value."""

    @pytest.mark.parametrize("case", shared_cases())
    def test_case(self, case):
        if case.get("slow") or case.get("app"):
            pytest.skip("decided by the server: a time limit, or the methods of a route")
        if "raw_zlib_base64" in case:
            raw = zlib.decompress(base64.b64decode(case["raw_zlib_base64"]))
        else:
            raw = base64.b64decode(case["raw_base64"])
        events = requests(raw, eof=bool(case.get("eof")))
        wanted = case.get("strict", case["expect"])
        first, end = [], None
        while events and end is None:
            event = events.pop(0)
            first.append(event)
            end = event if isinstance(event, End) else None
        if end is not None:
            assert "2xx" in wanted
            content = b"".join(event.data for event in first if isinstance(event, Content))
            if "body_base64" in case:
                assert content == base64.b64decode(case["body_base64"])
            assert 1 + sum(isinstance(event, Request) for event in events) <= case.get("n", 2)
        elif first and isinstance(first[-1], Refused):
            assert {first[-1], f"{first[-1] // 100}xx"} & set(wanted)
        else:
            assert "wait" in wanted


def test_the_method_of_a_refused_request_is_known() -> None:
    """A refusal has no content if the request was HEAD (RFC 9110 section 9.3.2)."""
    parser = http1.RequestParser()
    assert parser.method == ""
    parser.feed(b"HEAD / HTTP/1.1\r\n\r\n")
    with pytest.raises(http1.ProtocolError):
        parser.next_event()
    assert parser.method == "HEAD"

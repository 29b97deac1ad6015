"""RFC 6455, one class for each topic of the standard."""

import base64
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from require import require
from splits import splits

import http1
import websocket
from websocket import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    Close,
    Connection,
    Message,
    Ping,
    Pong,
    ProtocolError,
    Side,
    State,
    encode_frame,
)

KEY = bytes.fromhex("37fa213d")  # the masking key of the RFC's examples
CLIENT, SERVER = Side.CLIENT, Side.SERVER


class Failed(int):
    """The close code of a violation, at the end of a list of events."""


def drain(connection):
    """Return the events of the bytes fed so far, the last of which may be `Failed`."""
    events = []
    try:
        while (event := connection.next_event()) is not None:
            events.append(event)
    except ProtocolError as error:
        events.append(Failed(error.close_code))
    return events


def receive(side, fragments, **limits):
    connection = Connection(side, **limits)
    events = []
    for fragment in fragments:
        connection.feed(fragment)
        events += drain(connection)
    return events


def check(side, raw, expected, **limits):
    """Ask for the same events however `raw` arrives, with more bytes after it or without."""
    for fragments in splits(raw):
        assert receive(side, fragments, **limits) == expected, fragments


def masked(opcode, payload=b"", fin=True):
    return encode_frame(opcode, payload, fin=fin, mask=KEY)


def plain(opcode, payload=b"", fin=True):
    return encode_frame(opcode, payload, fin=fin)


def header(first, second, extended=b""):
    """The start of a frame, as bytes that `encode_frame` would refuse to write."""
    return bytes((first, second)) + extended


def cases(table):
    return [pytest.param(*values, id=name) for name, *values in table]


# The opening handshake: section 4

SAMPLE_KEY = "dGhlIHNhbXBsZSBub25jZQ=="
SAMPLE_ACCEPT = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
REQUEST = {
    "Host": ["server.example.com"],
    "Upgrade": ["websocket"],
    "Connection": ["Upgrade"],
    "Sec-WebSocket-Key": [SAMPLE_KEY],
    "Sec-WebSocket-Version": ["13"],
}
RESPONSE = {
    "Upgrade": ["websocket"],
    "Connection": ["Upgrade"],
    "Sec-WebSocket-Accept": [SAMPLE_ACCEPT],
}


def pairs(base, changes):
    return [(name, value) for name, values in (base | changes).items() for value in values]


def request(method="GET", version=(1, 1), **changes):
    changes = {name.replace("_", "-"): values for name, values in changes.items()}
    return http1.Request(method, "/ws", http1.Fields(pairs(REQUEST, changes)), version)


def response(status=101, **changes):
    changes = {name.replace("_", "-"): values for name, values in changes.items()}
    fields = http1.Fields(pairs(RESPONSE, changes))
    return http1.Response(status, "Switching Protocols", fields, (1, 1))


class TestOpeningHandshakeOfTheServer:
    @pytest.mark.parametrize(
        "opening",
        cases(
            [
                ("4.1-sample", request()),
                ("4.2.1-upgrade-in-any-case", request(Upgrade=["WebSocket"])),
                ("4.2.1-upgrade-among-others", request(Upgrade=["h2c, websocket"])),
                ("4.2.1-connection-of-firefox", request(Connection=["keep-alive, Upgrade"])),
                ("4.2.1-connection-over-lines", request(Connection=["keep-alive", "UPGRADE"])),
                ("4.2.1-upgrade-over-lines", request(Upgrade=["h2c", "websocket"])),
                ("4.2.1-http-1.2", request(version=(1, 2))),
                ("4.1-key-of-zeros", request(Sec_WebSocket_Key=["A" * 22 + "=="])),
                ("9.1-extension-offered", request(Sec_WebSocket_Extensions=["permessage-deflate"])),
                ("1.9-subprotocol-offered", request(Sec_WebSocket_Protocol=["chat, superchat"])),
                ("9110-8.6-no-content", request(Content_Length=["0"])),
            ]
        ),
    )
    def test_accepts(self, opening):
        websocket.check_request(opening)

    @pytest.mark.parametrize(
        ("opening", "status"),
        cases(
            [
                ("4.2.1-post", request("POST"), 405),
                ("4.2.1-method-is-case-sensitive", request("get"), 405),
                ("4.2.1-http-1.0", request(version=(1, 0)), 400),
                ("4.2.1-no-upgrade", request(Upgrade=[]), 426),
                ("4.2.1-upgrade-to-another", request(Upgrade=["h2c"]), 426),
                ("4.2.1-upgrade-not-a-whole-token", request(Upgrade=["websockets"]), 426),
                ("4.2.1-no-connection", request(Connection=[]), 426),
                ("4.2.1-connection-without-upgrade", request(Connection=["keep-alive"]), 426),
                ("4.4-no-version", request(Sec_WebSocket_Version=[]), 426),
                ("4.4-version-8", request(Sec_WebSocket_Version=["8"]), 426),
                ("4.4-version-of-other-form", request(Sec_WebSocket_Version=["+13"]), 426),
                ("4.4-version-with-zero", request(Sec_WebSocket_Version=["013"]), 426),
                ("4.4-two-versions", request(Sec_WebSocket_Version=["13", "13"]), 426),
                ("4.2.1-no-key", request(Sec_WebSocket_Key=[]), 400),
                ("4.2.1-empty-key", request(Sec_WebSocket_Key=[""]), 400),
                ("11.3.1-two-keys", request(Sec_WebSocket_Key=[SAMPLE_KEY, SAMPLE_KEY]), 400),
                ("4.2.1-key-of-15-bytes", request(Sec_WebSocket_Key=["A" * 20]), 400),
                ("4.2.1-key-of-17-bytes", request(Sec_WebSocket_Key=["A" * 23 + "="]), 400),
                ("4.2.1-key-without-padding", request(Sec_WebSocket_Key=["A" * 22]), 400),
                ("4648-3.5-key-not-canonical", request(Sec_WebSocket_Key=["A" * 21 + "B=="]), 400),
                ("4648-5-key-in-url-alphabet", request(Sec_WebSocket_Key=["-" * 21 + "A=="]), 400),
                ("4.2.1-key-then-newline", request(Sec_WebSocket_Key=[SAMPLE_KEY + "\n"]), 400),
                ("9110-9.3.1-content", request(Content_Length=["5"]), 400),
                ("9110-9.3.1-chunked-content", request(Transfer_Encoding=["chunked"]), 400),
            ]
        ),
    )
    def test_refuses(self, opening, status):
        with pytest.raises(http1.ProtocolError) as caught:
            websocket.check_request(opening)
        assert caught.value.status == status

    def test_426_names_the_version(self):
        assert ("Sec-WebSocket-Version", "13") in websocket.UPGRADE_REQUIRED_FIELDS
        assert ("Upgrade", "websocket") in websocket.UPGRADE_REQUIRED_FIELDS
        assert ("Connection", "Upgrade") in websocket.UPGRADE_REQUIRED_FIELDS

    def test_response_of_section_1_3(self):
        assert websocket.response_fields(request()) == pairs(RESPONSE, {})

    def test_declines_extensions_and_subprotocols(self):
        offers = request(Sec_WebSocket_Extensions=["x"], Sec_WebSocket_Protocol=["chat"])
        assert websocket.response_fields(offers) == pairs(RESPONSE, {})


class TestOpeningHandshakeOfTheClient:
    def test_key_is_16_fresh_bytes(self):
        keys = {websocket.new_key() for _ in range(20)}
        assert len(keys) == 20
        assert {len(base64.b64decode(key, validate=True)) for key in keys} == {16}

    def test_accept_value_of_section_1_3(self):
        assert websocket.accept_value(SAMPLE_KEY) == SAMPLE_ACCEPT

    def test_own_request_passes(self):
        fields = websocket.request_fields(websocket.new_key())
        opening = http1.Request("GET", "/ws", http1.Fields([("Host", "x"), *fields]), (1, 1))
        websocket.check_request(opening)

    @pytest.mark.parametrize(
        "answer",
        cases(
            [
                ("4.2.2-sample", response()),
                ("4.1-upgrade-in-any-case", response(Upgrade=["WebSocket"])),
                ("4.1-connection-in-any-case", response(Connection=["upgrade"])),
                ("4.1-connection-with-more", response(Connection=["keep-alive", "Upgrade"])),
            ]
        ),
    )
    def test_accepts(self, answer):
        websocket.check_response(answer, SAMPLE_KEY)

    @pytest.mark.parametrize(
        ("answer", "word"),
        cases(
            [
                ("4.1-status-200", response(200), "200"),
                ("4.1-status-401", response(401), "401"),
                ("4.1-no-upgrade", response(Upgrade=[]), "upgrade"),
                ("4.1-other-upgrade", response(Upgrade=["h2c"]), "upgrade"),
                ("4.1-two-upgrades", response(Upgrade=["websocket, h2c"]), "upgrade"),
                ("4.1-no-connection", response(Connection=[]), "Connection"),
                ("4.1-other-connection", response(Connection=["close"]), "Connection"),
                ("4.1-no-accept", response(Sec_WebSocket_Accept=[]), "Accept"),
                ("4.1-accept-is-the-key", response(Sec_WebSocket_Accept=[SAMPLE_KEY]), "Accept"),
                (
                    "4.1-accept-in-other-case",
                    response(Sec_WebSocket_Accept=[SAMPLE_ACCEPT.lower()]),
                    "Accept",
                ),
                (
                    "11.3.3-two-accepts",
                    response(Sec_WebSocket_Accept=[SAMPLE_ACCEPT] * 2),
                    "Accept",
                ),
                (
                    "4.1-extension-not-asked-for",
                    response(Sec_WebSocket_Extensions=["permessage-deflate"]),
                    "Extensions",
                ),
                (
                    "4.1-subprotocol-not-asked-for",
                    response(Sec_WebSocket_Protocol=["chat"]),
                    "Protocol",
                ),
            ]
        ),
    )
    def test_refuses(self, answer, word):
        with pytest.raises(ProtocolError, match=word):
            websocket.check_response(answer, SAMPLE_KEY)


# Frames: section 5


class TestBaseFraming:
    """Sections 5.2 and 5.7: the examples of the RFC, then each length and each forbidden bit."""

    @pytest.mark.parametrize(
        ("side", "raw", "expected"),
        cases(
            [
                ("5.7-text", CLIENT, bytes.fromhex("810548656c6c6f"), [Message("Hello")]),
                (
                    "5.7-masked-text",
                    SERVER,
                    bytes.fromhex("818537fa213d7f9f4d5158"),
                    [Message("Hello")],
                ),
                (
                    "5.7-fragments",
                    CLIENT,
                    bytes.fromhex("010348656c 80026c6f"),
                    [Message("Hello")],
                ),
                ("5.7-ping", CLIENT, bytes.fromhex("890548656c6c6f"), [Ping(b"Hello")]),
                (
                    "5.7-masked-pong",
                    SERVER,
                    bytes.fromhex("8a8537fa213d7f9f4d5158"),
                    [Pong(b"Hello")],
                ),
                ("5.2-empty-text", SERVER, masked(TEXT), [Message("")]),
                ("5.2-empty-binary", CLIENT, plain(BINARY), [Message(b"")]),
                (
                    "5.2-all-bytes",
                    SERVER,
                    masked(BINARY, bytes(range(256))),
                    [Message(bytes(range(256)))],
                ),
                (
                    "6.2-several-in-one-read",
                    SERVER,
                    masked(TEXT, b"a") + masked(PING) + masked(BINARY, b"b"),
                    [Message("a"), Ping(b""), Message(b"b")],
                ),
            ]
        ),
    )
    def test_receives(self, side, raw, expected):
        check(side, raw, expected)

    @pytest.mark.parametrize("side", [CLIENT, SERVER])
    @pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65535, 65536, 70001])
    def test_lengths(self, side, size):
        payload = bytes(i * 7 % 256 for i in range(size))
        mask = KEY if side is SERVER else None
        raw = encode_frame(BINARY, payload, mask=mask)
        for cut in (1, 2, 3, 4, 9, 10, 13, 14, size // 2 + 1, len(raw) - 1):
            fragments = [raw[:cut], raw[cut:]]
            assert receive(side, fragments) == [Message(payload)]

    def test_256_bytes_of_section_5_7(self):
        assert plain(BINARY, bytes(256))[:4] == bytes.fromhex("827e0100")

    def test_64_kib_of_section_5_7(self):
        assert plain(BINARY, bytes(65536))[:10] == bytes.fromhex("827f0000000000010000")

    @pytest.mark.parametrize(
        ("raw", "code"),
        cases(
            [
                ("5.2-rsv1", header(0xC1, 0x80), 1002),
                ("5.2-rsv2", header(0xA1, 0x80), 1002),
                ("5.2-rsv3", header(0x91, 0x80), 1002),
                ("5.2-rsv1-on-ping", header(0xC9, 0x80), 1002),
                *((f"5.2-opcode-{n}", header(0x80 | n, 0x80), 1002) for n in range(3, 8)),
                *((f"5.2-opcode-{n}", header(0x80 | n, 0x80), 1002) for n in range(11, 16)),
                ("5.2-16-bit-0", header(0x82, 0xFE, b"\0\0"), 1002),
                ("5.2-16-bit-5", header(0x82, 0xFE, b"\0\5"), 1002),
                ("5.2-16-bit-125", header(0x82, 0xFE, b"\0\x7d"), 1002),
                ("5.2-64-bit-5", header(0x82, 0xFF, bytes(7) + b"\5"), 1002),
                ("5.2-64-bit-65535", header(0x82, 0xFF, bytes(6) + b"\xff\xff"), 1002),
                ("5.2-top-bit", header(0x82, 0xFF, b"\x80" + bytes(7)), 1002),
                ("5.2-all-bits", header(0x82, 0xFF, b"\xff" * 8), 1002),
            ]
        ),
    )
    def test_fails_at_the_header(self, raw, code):
        check(SERVER, raw, [Failed(code)])
        # What came before is not lost, what comes after is not read.
        good = masked(TEXT, b"good")
        check(SERVER, good + raw + good, [Message("good"), Failed(code)])

    @pytest.mark.parametrize("opcode", [3, 7, 11, 15, 16, -1])
    def test_does_not_send_reserved_opcodes(self, opcode):
        with pytest.raises(ValueError, match="reserved"):
            encode_frame(opcode, b"")


class TestMasking:
    """Sections 5.1 and 5.3."""

    @pytest.mark.parametrize("opcode", [TEXT, BINARY, CLOSE, PING, PONG])
    def test_server_needs_the_mask(self, opcode):
        check(SERVER, plain(opcode), [Failed(1002)])

    @pytest.mark.parametrize("opcode", [TEXT, BINARY, CLOSE, PING, PONG])
    def test_client_refuses_it(self, opcode):
        check(CLIENT, masked(opcode), [Failed(1002)])

    def test_client_does_not_take_the_key_for_a_close_code(self):
        # 0x03E8 is 1000: the first bytes of this key would pass for a normal close.
        raw = encode_frame(CLOSE, b"\x03\xe8", mask=b"\x03\xe8\0\0")
        assert receive(CLIENT, [raw[:2], raw[2:]]) == [Failed(1002)]

    def test_unmasked_bytes_are_never_waited_for(self):
        assert receive(SERVER, [header(0x81, 0x05)]) == [Failed(1002)]

    @pytest.mark.parametrize("size", range(18))
    def test_is_its_own_inverse(self, size):
        payload = bytes(range(100, 100 + size))
        expected = bytes(byte ^ KEY[i % 4] for i, byte in enumerate(payload))
        assert websocket.apply_mask(payload, KEY) == expected
        assert websocket.apply_mask(expected, KEY) == payload

    def test_key_turns_with_each_partial_read(self):
        payload = bytes(range(200))
        raw = masked(BINARY, payload)
        for step in range(1, 9):
            fragments = [raw[i : i + step] for i in range(0, len(raw), step)]
            assert receive(SERVER, fragments) == [Message(payload)]

    def test_client_draws_a_key_for_each_frame(self):
        connection = Connection(CLIENT)
        assert len({connection.ping()[2:] for _ in range(20)}) == 20

    def test_server_sends_none(self):
        assert Connection(SERVER).message("hi") == b"\x81\x02hi"

    @pytest.mark.parametrize("key", [b"", b"123", b"12345"])
    def test_refuses_keys_of_other_lengths(self, key):
        with pytest.raises(ValueError, match="4 bytes"):
            encode_frame(TEXT, b"x", mask=key)


class TestFragmentation:
    """Section 5.4."""

    @pytest.mark.parametrize(
        ("raw", "expected"),
        cases(
            [
                (
                    "5.4-three-parts",
                    masked(TEXT, b"a", False)
                    + masked(CONTINUATION, b"b", False)
                    + masked(CONTINUATION, b"c"),
                    [Message("abc")],
                ),
                (
                    "5.4-ping-between",
                    masked(TEXT, b"he", False) + masked(PING) + masked(CONTINUATION, b"llo"),
                    [Ping(b""), Message("hello")],
                ),
                (
                    "5.4-pong-between",
                    masked(BINARY, b"he", False)
                    + masked(PONG, b"p")
                    + masked(CONTINUATION, b"llo"),
                    [Pong(b"p"), Message(b"hello")],
                ),
                (
                    "5.4-close-between",
                    masked(TEXT, b"he", False)
                    + masked(CLOSE, b"\x03\xe8")
                    + masked(CONTINUATION, b"llo"),
                    [Close(1000, "")],
                ),
                (
                    "5.4-all-empty",
                    masked(TEXT, b"", False)
                    + masked(CONTINUATION, b"", False)
                    + masked(CONTINUATION),
                    [Message("")],
                ),
                (
                    "5.4-empty-then-bytes",
                    masked(BINARY, b"", False) + masked(CONTINUATION, b"x"),
                    [Message(b"x")],
                ),
                (
                    "5.4-two-messages",
                    masked(TEXT, b"a", False)
                    + masked(CONTINUATION, b"b")
                    + masked(BINARY, b"c", False)
                    + masked(CONTINUATION, b"d"),
                    [Message("ab"), Message(b"cd")],
                ),
                ("5.4-unfinished", masked(TEXT, b"a", False), []),
                ("5.4-nothing-to-continue", masked(CONTINUATION, b"x"), [Failed(1002)]),
                ("5.4-nothing-to-go-on-with", masked(CONTINUATION, b"x", False), [Failed(1002)]),
                (
                    "5.4-continued-after-the-end",
                    masked(TEXT, b"a") + masked(CONTINUATION, b"x"),
                    [Message("a"), Failed(1002)],
                ),
                (
                    "5.4-new-message-within",
                    masked(TEXT, b"he", False) + masked(TEXT, b"llo"),
                    [Failed(1002)],
                ),
                (
                    "5.4-new-fragmented-message-within",
                    masked(TEXT, b"he", False) + masked(BINARY, b"llo", False),
                    [Failed(1002)],
                ),
            ]
        ),
    )
    def test_receives(self, raw, expected):
        check(SERVER, raw, expected)

    def test_65536_fragments(self):
        """Autobahn 9.3 and 9.4: 4 MiB in fragments of 64 bytes."""
        raw = b"".join(masked(CONTINUATION, bytes(64), False) for _ in range(65534))
        raw = masked(BINARY, bytes(64), False) + raw + masked(CONTINUATION, bytes(64))
        assert receive(SERVER, [raw], max_message_bytes=2**22) == [Message(bytes(2**22))]


class TestControlFrames:
    """Section 5.5."""

    @pytest.mark.parametrize("kind", [Ping, Pong])
    @pytest.mark.parametrize("size", [0, 1, 4, 124, 125])
    def test_receives(self, kind, size):
        payload = bytes(range(size))
        check(SERVER, masked(PING if kind is Ping else PONG, payload), [kind(payload)])

    @pytest.mark.parametrize("opcode", [CLOSE, PING, PONG])
    @pytest.mark.parametrize(
        ("first", "second"),
        cases(
            [
                ("5.5-fragmented", 0x00, 0x80),
                ("5.5-16-bit-length", 0x80, 0xFE),
                ("5.5-64-bit-length", 0x80, 0xFF),
            ]
        ),
    )
    def test_fails_at_two_bytes(self, opcode, first, second):
        check(SERVER, header(first | opcode, second), [Failed(1002)])

    def test_the_message_limit_is_not_theirs(self):
        check(SERVER, masked(PING, b"12345"), [Ping(b"12345")], max_message_bytes=4)

    def test_waits_for_all_of_the_payload(self):
        assert receive(SERVER, [masked(PING, b"12345")[:-1]]) == []

    def test_answers(self):
        connection = Connection(SERVER)
        assert connection.ping(b"p") == plain(PING, b"p")
        assert connection.pong(b"p") == plain(PONG, b"p")
        assert connection.ping() == plain(PING)
        assert connection.pong(bytes(125)) == plain(PONG, bytes(125))

    def test_does_not_send_what_is_forbidden(self):
        with pytest.raises(ValueError, match="125"):
            Connection(SERVER).ping(bytes(126))
        with pytest.raises(ValueError, match="no fragments"):
            encode_frame(PING, b"", fin=False)


# The closing handshake: section 7


class TestCloseFrame:
    """Sections 5.5.1 and 7.4."""

    @pytest.mark.parametrize(
        ("payload", "expected"),
        cases(
            [
                ("7.1.5-empty", b"", Close(1005, "")),
                ("7.1.5-code", b"\x03\xe8", Close(1000, "")),
                ("7.1.6-reason", b"\x03\xe9" + "fin é 你 😀".encode(), Close(1001, "fin é 你 😀")),
                ("7.1.6-longest-reason", b"\x03\xe8" + b"x" * 123, Close(1000, "x" * 123)),
                ("5.5.1-one-byte", b"\x03", Failed(1002)),
                ("8.1-reason-not-utf-8", b"\x03\xe8\xff", Failed(1007)),
                ("8.1-reason-cut-short", b"\x03\xe8\xe4\xbd", Failed(1007)),
                ("8.1-reason-with-surrogate", b"\x03\xe8\xed\xa0\x80", Failed(1007)),
            ]
        ),
    )
    def test_receives(self, payload, expected):
        check(SERVER, masked(CLOSE, payload), [expected])

    @pytest.mark.parametrize(
        "code", [1000, 1001, 1002, 1003, *range(1007, 1015), 3000, 3999, 4000, 4999]
    )
    def test_allowed_codes(self, code):
        payload = code.to_bytes(2, "big")
        check(SERVER, masked(CLOSE, payload), [Close(code, "")])
        assert Connection(SERVER).close(code) == plain(CLOSE, payload)

    @pytest.mark.parametrize(
        "code", [0, 1, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65535]
    )
    def test_forbidden_codes(self, code):
        check(SERVER, masked(CLOSE, code.to_bytes(2, "big")), [Failed(1002)])
        with pytest.raises(ValueError, match=str(code)):
            Connection(SERVER).close(code, "why")

    def test_1005_is_sent_as_nothing(self):
        assert Connection(SERVER).close(1005) == plain(CLOSE)

    @pytest.mark.parametrize("code", [-1, 65536, 1006])
    def test_a_refused_close_leaves_the_connection_open(self, code):
        connection = Connection(SERVER)
        with pytest.raises(ValueError, match=str(code)):
            connection.close(code)
        assert connection.state is State.OPEN

    @pytest.mark.parametrize(
        ("reason", "sent"),
        cases(
            [
                ("5.5-fits", "x" * 123, "x" * 123),
                ("5.5-cut", "x" * 124, "x" * 123),
                ("5.5-cut-after-two-bytes", "x" * 121 + "é" + "y", "x" * 121 + "é"),
                ("5.5-cut-in-two-bytes", "x" * 122 + "é", "x" * 122),
                ("5.5-cut-in-three-bytes", "x" * 121 + "你", "x" * 121),
                ("5.5-cut-in-four-bytes", "x" * 120 + "😀", "x" * 120),
            ]
        ),
    )
    def test_reason_is_cut_at_a_character(self, reason, sent):
        assert Connection(SERVER).close(1000, reason)[4:].decode() == sent


class TestClosingHandshake:
    """Section 7.1: who has said Close, and what may still be said."""

    def test_peer_starts(self):
        server = Connection(SERVER)
        assert server.state is State.OPEN
        server.feed(masked(CLOSE, b"\x03\xe8"))
        assert server.next_event() == Close(1000, "")
        assert server.state is State.CLOSING
        assert server.message("last words") == b"\x81\x0alast words"
        assert server.close(1000) == plain(CLOSE, b"\x03\xe8")
        assert server.state is State.CLOSED

    def test_we_start(self):
        server = Connection(SERVER)
        assert server.close() == plain(CLOSE, b"\x03\xe8")
        assert server.state is State.CLOSING
        server.feed(masked(TEXT, b"under way") + masked(PING, b"p") + masked(CLOSE, b"\x03\xe8"))
        assert server.next_event() == Message("under way")
        assert server.next_event() == Ping(b"p")
        assert server.pong(b"p") == plain(PONG, b"p")
        assert server.next_event() == Close(1000, "")
        assert server.state is State.CLOSED
        assert server.close(1000) == b""

    def test_an_empty_close_is_echoed_empty(self):
        client = Connection(CLIENT)
        client.feed(plain(CLOSE))
        event = client.next_event()
        answer = client.close(event.code)
        assert receive(SERVER, [answer]) == [Close(1005, "")]

    @pytest.mark.parametrize("after", [masked(TEXT, b"x"), masked(CLOSE), b"\xff" * 20, b"\x81"])
    def test_nothing_after_a_close_counts(self, after):
        check(SERVER, masked(CLOSE) + after, [Close(1005, "")])

    def test_no_data_after_our_close(self):
        server = Connection(SERVER)
        server.close()
        for data in ("text", b"binary"):
            with pytest.raises(RuntimeError, match="Close"):
                server.message(data)

    def test_no_frame_once_closed(self):
        server = Connection(SERVER)
        server.close()
        server.feed(masked(CLOSE))
        server.next_event()
        for send in (server.ping, server.pong):
            with pytest.raises(RuntimeError, match="complete"):
                send(b"")

    def test_failing_the_connection(self):
        """Section 7.1.7: said once, answered with a Close, nothing processed from then on."""
        server = Connection(SERVER)
        server.feed(masked(TEXT, b"good") + header(0x83, 0x80) + masked(TEXT, b"lost"))
        assert server.next_event() == Message("good")
        with pytest.raises(ProtocolError, match="opcode 3") as caught:
            server.next_event()
        assert server.state is State.CLOSING
        server.feed(masked(TEXT, b"lost too"))
        assert server.next_event() is None
        frame = server.close(caught.value.close_code, str(caught.value))
        assert frame == plain(CLOSE, b"\x03\xeaopcode 3 is reserved")
        assert server.state is State.CLOSED

    def test_a_violation_after_our_close(self):
        server = Connection(SERVER)
        server.close()
        server.feed(plain(TEXT))
        with pytest.raises(ProtocolError, match="masked"):
            server.next_event()
        assert server.state is State.CLOSED
        assert server.close(1002) == b""


# Text: section 8.1

UTF8_BAD = [
    ("8.1-continuation-alone", b"\x80", 0),
    ("8.1-overlong-slash", b"\xc0\xaf", 0),
    ("8.1-overlong-c1", b"\xc1\xbf", 0),
    ("8.1-overlong-three-bytes", b"\xe0\x80\xaf", 1),
    ("8.1-overlong-four-bytes", b"\xf0\x80\x80\xaf", 1),
    ("8.1-surrogate-high", b"\xed\xa0\x80", 1),
    ("8.1-surrogate-low", b"\xed\xbf\xbf", 1),
    ("8.1-beyond-10ffff", b"\xf4\x90\x80\x80", 1),
    ("8.1-f5", b"\xf5\x80\x80\x80", 0),
    ("8.1-ff", b"\xff", 0),
    ("8.1-second-of-two", b"\xc3A", 1),
    ("8.1-third-of-three", b"\xe4\xbdA", 2),
    ("8.1-fourth-of-four", b"\xf0\x9f\x98A", 3),
]


class TestText:
    @pytest.mark.parametrize(
        "text", ["\0", "\x7f", "é", "你好", "😀", "\ud7ff\ue000", "\U0010ffff"]
    )
    def test_receives(self, text):
        check(SERVER, masked(TEXT, text.encode()), [Message(text)])

    def test_a_character_over_several_fragments(self):
        first, *middle, last = (bytes((byte,)) for byte in "😀你é".encode())
        raw = masked(TEXT, first, False)
        raw += b"".join(masked(CONTINUATION, byte, False) for byte in middle)
        check(SERVER, raw + masked(CONTINUATION, last), [Message("😀你é")])

    def test_an_empty_fragment_within_a_character(self):
        raw = masked(TEXT, b"\xe4\xbd", False) + masked(CONTINUATION, b"", False)
        check(SERVER, raw + masked(CONTINUATION, b"\xa0"), [Message("你")])

    @pytest.mark.parametrize(("bad", "first_bad_byte"), cases((i, b, n) for i, b, n in UTF8_BAD))
    def test_fails_at_the_first_bad_byte(self, bad, first_bad_byte):
        """Autobahn 6.4: at that byte, in an unfinished frame of an unfinished message."""
        frame = masked(TEXT, "κόσμε".encode() + bad + bytes(1000), False)
        start = frame.index(KEY) + 4 + len("κόσμε".encode())
        server = Connection(SERVER)
        server.feed(frame[: start + first_bad_byte])
        assert server.next_event() is None
        server.feed(frame[start + first_bad_byte :][:1])
        assert drain(server) == [Failed(1007)]

    @pytest.mark.parametrize(("bad", "first_bad_byte"), cases((i, b, n) for i, b, n in UTF8_BAD))
    def test_fails_however_it_arrives(self, bad, first_bad_byte):
        check(SERVER, masked(TEXT, b"ok" + bad), [Failed(1007)])
        raw = masked(TEXT, b"ok" + bad[:1], False) + masked(CONTINUATION, bad[1:])
        check(SERVER, raw, [Failed(1007)])

    @pytest.mark.parametrize("end", [b"\xc3", b"\xe4\xbd", b"\xf0\x9f\x98"])
    def test_fails_when_it_ends_within_a_character(self, end):
        check(SERVER, masked(TEXT, b"a" + end), [Failed(1007)])
        check(SERVER, masked(TEXT, end, False) + masked(CONTINUATION), [Failed(1007)])

    def test_every_pair_of_bytes(self):
        """Against the grammar of RFC 3629 section 4, each of the pairs in an unfinished frame."""
        second = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}
        start = encode_frame(TEXT, b"", fin=False)[:1] + b"\x03"
        for a in [*range(0x78, 0x88), *range(0xBC, 0x100)]:
            for b in range(256):
                low, high = second.get(a, (0x80, 0xBF))
                good = low <= b <= high if 0xC2 <= a <= 0xF4 else a < 0x80
                good = good and (a >= 0x80 or b < 0x80 or 0xC2 <= b <= 0xF4)
                expected = [] if good else [Failed(1007)]
                assert receive(CLIENT, [start + bytes((a, b))]) == expected, (a, b)

    def test_binary_is_not_checked(self):
        check(SERVER, masked(BINARY, b"\xff\xc0"), [Message(b"\xff\xc0")])

    def test_each_message_starts_anew(self):
        raw = masked(BINARY, b"\xe4", False) + masked(CONTINUATION, b"\xbd") + masked(TEXT, b"a")
        check(SERVER, raw, [Message(b"\xe4\xbd"), Message("a")])

    def test_does_not_send_lone_surrogates(self):
        with pytest.raises(ValueError, match="surrogates"):
            Connection(SERVER).message("\ud83d")


# Limits: section 10.4


class TestMessageLimit:
    @pytest.mark.parametrize(
        ("raw", "expected"),
        cases(
            [
                ("10.4-at-the-limit", masked(TEXT, b"x" * 200), [Message("x" * 200)]),
                ("10.4-one-more", masked(TEXT, b"x" * 201), [Failed(1009)]),
                ("7.4.1-announced-16-bit", header(0x82, 0xFE, b"\xff\xff"), [Failed(1009)]),
                (
                    "7.4.1-2-to-the-40",
                    header(0x82, 0xFF, (2**40).to_bytes(8, "big")),
                    [Failed(1009)],
                ),
                ("7.4.1-longest", header(0x82, 0xFF, b"\x7f" + b"\xff" * 7), [Failed(1009)]),
                (
                    "7.4.1-fragments-at-the-limit",
                    masked(TEXT, b"x" * 100, False) + masked(CONTINUATION, b"x" * 100),
                    [Message("x" * 200)],
                ),
                (
                    "7.4.1-fragments-add-up",
                    masked(TEXT, b"x" * 100, False) + masked(CONTINUATION, b"x" * 101),
                    [Failed(1009)],
                ),
                (
                    "7.4.1-counted-anew",
                    masked(BINARY, bytes(150)) * 2,
                    [Message(bytes(150)), Message(bytes(150))],
                ),
            ]
        ),
    )
    def test_bytes(self, raw, expected):
        check(SERVER, raw, expected, max_message_bytes=200)

    def test_the_header_is_enough(self):
        """Refused before the masking key and the payload have come."""
        raw = masked(TEXT, b"x" * 100, False) + header(0x80, 0x80 | 101)
        assert receive(SERVER, [raw], max_message_bytes=200) == [Failed(1009)]

    def test_bytes_not_characters(self):
        raw = masked(TEXT, "é".encode() * 101)
        assert receive(SERVER, [raw], max_message_bytes=200) == [Failed(1009)]

    def test_default(self):
        announced = websocket.MAX_MESSAGE_BYTES + 1
        raw = header(0x82, 0x7F, announced.to_bytes(8, "big"))
        assert receive(CLIENT, [raw]) == [Failed(1009)]


class TestMemory:
    """What is held is bounded by the bytes of the message, not by the number of its frames."""

    @staticmethod
    def peak(connection, fragments):
        tracemalloc.start()
        try:
            for fragment in fragments:
                connection.feed(fragment)
                assert drain(connection) == []
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize("opcode", [TEXT, BINARY])
    def test_empty_fragments(self, opcode):
        connection = Connection(SERVER)
        connection.feed(masked(opcode, b"", False))
        read = masked(CONTINUATION, b"", False) * 1000
        assert self.peak(connection, [read] * 20) < 3 * len(read)

    @pytest.mark.parametrize("opcode", [TEXT, BINARY])
    def test_fragments_of_one_byte(self, opcode):
        connection = Connection(SERVER)
        connection.feed(masked(opcode, b"", False))
        read = masked(CONTINUATION, b"x", False) * 1000
        assert self.peak(connection, [read] * 20) < 3 * len(read) + 2 * 20_000

    def test_announced_bytes_are_not_reserved(self):
        announced = header(0x82, 0xFF, (2**40).to_bytes(8, "big")) + KEY
        connection = Connection(SERVER, max_message_bytes=2**41)
        assert self.peak(connection, [announced]) < 10_000

    def test_nothing_is_kept_after_a_close(self):
        connection = Connection(SERVER)
        connection.feed(masked(CLOSE))
        connection.next_event()
        assert self.peak(connection, [bytes(1000)] * 1000) < 10_000

    def test_16_mib_in_small_reads(self):
        """A copy of all that is held at each read would move 64 GiB here."""
        raw = masked(BINARY, bytes(2**24))
        reads = [raw[i : i + 2048] for i in range(0, len(raw), 2048)]
        events = receive(SERVER, reads, max_message_bytes=2**24)
        assert events == [Message(bytes(2**24))]


# Another implementation


class TestAgainstWebsockets:
    """The `websockets` library at the other end, in both roles."""

    DATA = ("", "Hello", "é你😀" * 50, b"", b"\xff\0", bytes(126), bytes(65536))

    def test_it_reads_what_we_send(self):
        protocol = require("websockets.protocol")
        for side, theirs in ((CLIENT, protocol.SERVER), (SERVER, protocol.CLIENT)):
            ours, peer = Connection(side), protocol.Protocol(theirs)
            for data in self.DATA:
                peer.receive_data(ours.message(data))
                (frame,) = peer.events_received()
                assert frame.opcode == (TEXT if isinstance(data, str) else BINARY)
                received = bytes(frame.data)
                assert (received.decode() if isinstance(data, str) else received) == data
            peer.receive_data(ours.ping(b"p") + ours.pong(b"q") + ours.close(1001, "fin"))
            opcodes = [(frame.opcode, bytes(frame.data)) for frame in peer.events_received()]
            assert opcodes == [(PING, b"p"), (PONG, b"q"), (CLOSE, b"\x03\xe9fin")]
            assert (peer.close_rcvd.code, peer.close_rcvd.reason) == (1001, "fin")

    def test_we_read_what_it_sends(self):
        protocol = require("websockets.protocol")
        for side, theirs in ((CLIENT, protocol.SERVER), (SERVER, protocol.CLIENT)):
            peer = protocol.Protocol(theirs)
            for data in self.DATA:
                if isinstance(data, str):
                    peer.send_text(data.encode())
                else:
                    peer.send_binary(data)
            peer.send_text(b"frag", fin=False)
            peer.send_ping(b"p")
            peer.send_continuation(b"ment", fin=True)
            peer.send_pong(b"q")
            peer.send_close(4000, "ciao")
            messages = [Message(data) for data in self.DATA]
            ends = [Ping(b"p"), Message("fragment"), Pong(b"q"), Close(4000, "ciao")]
            assert receive(side, peer.data_to_send()) == messages + ends

    def test_it_accepts_our_request(self):
        server = require("websockets.server")
        key = websocket.new_key()
        peer = server.ServerProtocol()
        fields = [("Host", "x"), *websocket.request_fields(key)]
        peer.receive_data(http1.encode_request("GET", "/ws", fields))
        (opening,) = peer.events_received()
        answer = peer.accept(opening)
        fields = http1.Fields(answer.headers.raw_items())
        websocket.check_response(http1.Response(answer.status_code, "", fields, (1, 1)), key)

    def test_it_accepts_our_response(self):
        client = require("websockets.client")
        uri = require("websockets.uri")
        peer = client.ClientProtocol(uri.parse_uri("ws://x/ws"))
        opening = peer.connect()
        request = http1.Request("GET", "/ws", http1.Fields(opening.headers.raw_items()), (1, 1))
        websocket.check_request(request)
        lines = [f"{name}: {value}\r\n" for name, value in websocket.response_fields(request)]
        head = "HTTP/1.1 101 Switching Protocols\r\n" + "".join(lines) + "\r\n"
        peer.send_request(opening)
        peer.receive_data(head.encode())
        assert peer.handshake_exc is None
        assert peer.state.name == "OPEN"


# Laws


def data_frames(data, cuts, mask):
    """Encode one message cut at the given places into one frame or more."""
    payload = data.encode() if isinstance(data, str) else data
    places = [0, *sorted(cut % (len(payload) + 1) for cut in cuts), len(payload)]
    opcode = TEXT if isinstance(data, str) else BINARY
    frames = []
    for start, end in pairwise(places):
        fin = len(frames) == len(places) - 2
        frames.append(encode_frame(opcode, payload[start:end], fin=fin, mask=mask))
        opcode = CONTINUATION
    return frames


masks = st.binary(min_size=4, max_size=4)
texts = st.text(st.characters(exclude_categories=["Cs"]))
messages = st.tuples(texts | st.binary(max_size=200), st.lists(st.integers(0, 500), max_size=4))
small = st.binary(max_size=125)


@st.composite
def streams(draw):
    """Valid frames from a client, with control frames anywhere between, and their events."""
    raw, events = b"", []
    for data, cuts in draw(st.lists(messages, max_size=4)):
        for frame in data_frames(data, cuts, draw(masks)):
            for kind, opcode in ((Ping, PING), (Pong, PONG)):
                if draw(st.booleans()):
                    payload = draw(small)
                    raw += encode_frame(opcode, payload, mask=draw(masks))
                    events.append(kind(payload))
            raw += frame
        events.append(Message(data))
    return raw, events


def cut_at(raw, cuts):
    places = [0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
    return [raw[start:end] for start, end in pairwise(places)]


class TestLaws:
    @given(streams(), st.lists(st.integers(0, 5000), max_size=6))
    def test_what_was_encoded_is_parsed_back(self, stream, cuts):
        raw, events = stream
        assert receive(SERVER, cut_at(raw, cuts)) == events

    @given(st.binary(max_size=300), st.sampled_from(Side), st.lists(st.integers(0, 300)))
    @example(b"", SERVER, [])
    def test_any_bytes_end_in_events_or_one_protocol_error(self, raw, side, cuts):
        events = receive(side, [raw], max_message_bytes=100)
        assert receive(side, cut_at(raw, cuts), max_message_bytes=100) == events
        assert all(not isinstance(event, Failed | Close) for event in events[:-1])

    @given(
        streams(),
        st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=3),
        st.lists(st.integers(0, 5000), max_size=6),
    )
    def test_mutated_frames_end_in_events_or_one_protocol_error(self, stream, changes, cuts):
        raw = bytearray(stream[0])
        for place, value in changes:
            if raw:
                raw[place % len(raw)] = value
        events = receive(SERVER, [raw])
        assert receive(SERVER, cut_at(raw, cuts)) == events
        assert all(not isinstance(event, Failed | Close) for event in events[:-1])

    @given(st.sampled_from([1000, 1001, 1011, 3000, 4999]), texts)
    def test_a_close_arrives_with_the_start_of_its_reason(self, code, reason):
        (event,) = receive(SERVER, [Connection(CLIENT).close(code, reason)])
        assert event.code == code
        assert reason.startswith(event.reason)
        assert len(event.reason.encode()) > 119 or event.reason == reason

    @given(st.binary(max_size=300), masks)
    def test_masking_is_byte_by_byte_xor(self, payload, key):
        expected = bytes(byte ^ key[i % 4] for i, byte in enumerate(payload))
        assert websocket.apply_mask(payload, key) == expected

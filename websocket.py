"""WebSockets (RFC 6455): opening handshake, frames, messages and closing handshake, both roles.

A WebSocket starts as one HTTP/1.1 request that asks to leave HTTP (section 4):

    GET /ws HTTP/1.1                                 HTTP/1.1 101 Switching Protocols
    Host: 127.0.0.1:8765                             Upgrade: websocket
    Upgrade: websocket                               Connection: Upgrade
    Connection: Upgrade                              Sec-WebSocket-Accept: s3pPLMBiTxaQ9k...
    Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==
    Sec-WebSocket-Version: 13

After the 101 the same TCP connection carries frames in both directions (section 5.2):

     0               1               2               3
    +-+-+-+-+-------+-+-------------+-------------------------------+
    |F|R|R|R| opcode|M| Payload len |  Extended payload length      |
    |I|S|S|S|  (4)  |A|     (7)     |  (16 bits if Payload len is   |
    |N|V|V|V|       |S|             |  126, 64 bits if it is 127)   |
    | |1|2|3|       |K|             |                               |
    +-+-+-+-+-------+-+-------------+-------------------------------+
    |  Masking-key (4 bytes, in every frame from the client and in  |
    |  none from the server), then the payload                      |
    +---------------------------------------------------------------+

A message is one data frame, or several fragments of which only the last has FIN set. Control
frames (Close, Ping, Pong) may stand between the fragments. The connection ends with one Close
frame in each direction, the closing handshake (section 7):

             close() or a Close arrives             and the other way round
        OPEN --------------------------> CLOSING --------------------------> CLOSED

No sockets here: `Connection.feed` takes the bytes that were read, `Connection.next_event` returns
what they say, and the encoders return the bytes to write. The caller answers a `Ping` with
`pong(event.payload)` and a `Close` with `close(event.code)`; on a `ProtocolError` it fails the
connection: writes `close(error.close_code, str(error))` and closes the TCP connection.

Not here: extensions such as permessage-deflate (RFC 7692) and subprotocols, always declined, which
section 4.2.2 permits: the messages of this project are a few bytes, and it has one protocol.
Not here either: the Origin policy (`access.py`), time limits and Pings (`duplex.py`).

Read next: `detokenizer.py`, where the text that travels in these messages comes from.
"""

import base64
import codecs
import hashlib
import re
import secrets
from dataclasses import dataclass
from enum import Enum

import http1

# Section 1.3: proof that the server understood this protocol and did not just echo the key.
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"

# Section 4.4: these fields belong in the 426 (Upgrade Required) that `check_request` asks for.
UPGRADE_REQUIRED_FIELDS = (
    ("Upgrade", "websocket"),
    ("Connection", "Upgrade"),
    ("Sec-WebSocket-Version", "13"),
)

# A prompt has the same bound as the content of an HTTP request.
MAX_MESSAGE_BYTES = 1024 * 1024

# Section 5.5: a control frame must fit in the smallest form of the header.
MAX_CONTROL_BYTES = 125

# Section 7.4.1: stands for a Close frame without a code, and is never sent as one.
NO_STATUS_RECEIVED = 1005


class ProtocolError(Exception):
    """The peer broke the protocol; `close_code` is what the answering Close frame should say."""

    def __init__(self, message: str, close_code: int = 1002) -> None:
        super().__init__(message)
        self.close_code = close_code


# Opening handshake: section 4


def new_key() -> str:
    """Return a fresh `Sec-WebSocket-Key`: 16 random bytes in base64 (section 4.1, item 7)."""
    return base64.b64encode(secrets.token_bytes(16)).decode("ascii")


def accept_value(key: str) -> str:
    """Return the `Sec-WebSocket-Accept` that answers `key` (section 4.2.2, item 5.4)."""
    digest = hashlib.sha1(key.encode("ascii") + GUID, usedforsecurity=False).digest()
    return base64.b64encode(digest).decode("ascii")


def request_fields(key: str) -> list[tuple[str, str]]:
    """Return the fields that a client adds to its GET request, beside `Host` (section 4.1)."""
    return [
        ("Upgrade", "websocket"),
        ("Connection", "Upgrade"),
        ("Sec-WebSocket-Key", key),
        ("Sec-WebSocket-Version", "13"),
    ]


def check_request(request: http1.Request) -> None:
    """Raise `http1.ProtocolError` unless `request` opens a WebSocket (section 4.2.1).

    The status is 405 for a method other than GET, 426 where the client should upgrade or use
    version 13 (answer with `UPGRADE_REQUIRED_FIELDS`), and 400 for everything else.
    """
    fields = request.fields
    if request.method != "GET":
        raise http1.ProtocolError("a WebSocket is opened with GET", 405)
    if request.version < (1, 1):
        raise http1.ProtocolError("a WebSocket is opened with HTTP/1.1", 400)
    if "websocket" not in fields.tokens("Upgrade") or "upgrade" not in fields.tokens("Connection"):
        raise http1.ProtocolError("this address speaks WebSocket only", 426)
    if fields.get_all("Sec-WebSocket-Version") != ["13"]:
        raise http1.ProtocolError("only WebSocket version 13 is spoken here", 426)
    # 16 bytes are 22 base64 digits; the last digit carries two bits, its other four are zero.
    keys = fields.get_all("Sec-WebSocket-Key")
    if len(keys) != 1 or not re.fullmatch(r"[A-Za-z0-9+/]{21}[AQgw]==", keys[0]):
        raise http1.ProtocolError("Sec-WebSocket-Key must be 16 bytes in base64", 400)
    # RFC 9110 section 9.3.1: content in a GET has no meaning; here it could be read as frames.
    if "Transfer-Encoding" in fields or fields.get("Content-Length", "0") != "0":
        raise http1.ProtocolError("an opening handshake has no content", 400)


def response_fields(request: http1.Request) -> list[tuple[str, str]]:
    """Return the fields of the 101 response to a request that `check_request` has passed.

    No `Sec-WebSocket-Extensions` or `-Protocol`: what the client offered is declined thereby.
    """
    (key,) = request.fields.get_all("Sec-WebSocket-Key")
    return [
        ("Upgrade", "websocket"),
        ("Connection", "Upgrade"),
        ("Sec-WebSocket-Accept", accept_value(key)),
    ]


def check_response(response: http1.Response, key: str) -> None:
    """Raise `ProtocolError` unless `response` accepts the request sent with `key` (section 4.1).

    The connection is not open yet: no Close frame is due, the client just closes.
    """
    fields = response.fields
    if response.status != 101:
        raise ProtocolError(f"the server answered {response.status}, not 101")
    if fields.tokens("Upgrade") != ["websocket"]:
        raise ProtocolError("the response does not upgrade to websocket")
    if "upgrade" not in fields.tokens("Connection"):
        raise ProtocolError("the response has no Connection: Upgrade")
    if fields.get_all("Sec-WebSocket-Accept") != [accept_value(key)]:
        raise ProtocolError("Sec-WebSocket-Accept does not answer the key")
    for name in ("Sec-WebSocket-Extensions", "Sec-WebSocket-Protocol"):
        if name in fields:
            raise ProtocolError(f"the response has {name}, which was not asked for")


# Frames: section 5


# What a frame is (section 5.2); opcodes 3 to 7 and 11 to 15 are reserved.
CONTINUATION, TEXT, BINARY = 0x0, 0x1, 0x2
CLOSE, PING, PONG = 0x8, 0x9, 0xA
OPCODES = frozenset({CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG})
CONTROL = 0x8  # the bit that tells control frames from data frames


def apply_mask(payload: bytes | bytearray, key: bytes) -> bytes:
    """Mask or unmask `payload`: byte i XOR byte i mod 4 of `key` (section 5.3).

    One XOR of two big integers: a loop over the bytes would be some thirty times slower.
    """
    n = len(payload)
    repeated = key * (n // 4) + key[: n % 4]
    masked = int.from_bytes(payload, "little") ^ int.from_bytes(repeated, "little")
    return masked.to_bytes(n, "little")


def encode_frame(
    opcode: int, payload: bytes, *, fin: bool = True, mask: bytes | None = None
) -> bytes:
    """Return one frame, masked with the 4 bytes of `mask` if given (section 5.2).

    Raises ValueError for a frame that the section forbids.
    """
    n = len(payload)
    if opcode not in OPCODES:
        raise ValueError(f"opcode {opcode} is reserved")
    if opcode & CONTROL and (n > MAX_CONTROL_BYTES or not fin):
        raise ValueError("a control frame has at most 125 bytes and no fragments")
    first = (0x80 if fin else 0) | opcode
    mask_bit = 0 if mask is None else 0x80
    if n < 126:
        header = bytes((first, mask_bit | n))
    elif n < 2**16:
        header = bytes((first, mask_bit | 126)) + n.to_bytes(2, "big")
    else:
        header = bytes((first, mask_bit | 127)) + n.to_bytes(8, "big")
    if mask is None:
        return header + payload
    if len(mask) != 4:
        raise ValueError("a masking key has 4 bytes")
    return header + mask + apply_mask(payload, mask)


def _parse_extended_length(encoded: bytearray) -> int:
    """Parse a length of 2 or 8 bytes: in the shortest form, and below 2**63 (section 5.2)."""
    length = int.from_bytes(encoded, "big")
    if length < (126 if len(encoded) == 2 else 2**16):
        raise ProtocolError("payload length is not in its shortest form")
    if length >= 2**63:
        raise ProtocolError("payload length has its highest bit set")
    return length


def _decode_text(payload: bytes | bytearray) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError:
        raise ProtocolError("text is not UTF-8", 1007) from None


def _is_valid_close_code(code: int) -> bool:
    """Tell whether `code` may stand in a Close frame (sections 7.4.1 and 7.4.2).

    1004 is reserved; 1005, 1006 and 1015 are for reports to the application only; 1012 to 1014
    were registered later (IANA); 3000 to 4999 belong to libraries and applications.
    """
    return 1000 <= code <= 1003 or 1007 <= code <= 1014 or 3000 <= code <= 4999


def _encode_close_payload(code: int, reason: str) -> bytes:
    if code == NO_STATUS_RECEIVED and not reason:
        return b""
    if not _is_valid_close_code(code):
        raise ValueError(f"close code {code} must not be sent")
    cut = reason.encode()[: MAX_CONTROL_BYTES - 2]
    # The cut may have left the first bytes of a character: "ignore" drops them.
    return code.to_bytes(2, "big") + cut.decode(errors="ignore").encode()


def _parse_close_payload(payload: bytes) -> "Close":
    """Parse the body of a Close frame: nothing, or a code and a reason (section 5.5.1)."""
    if not payload:
        return Close(NO_STATUS_RECEIVED, "")
    if len(payload) == 1:
        raise ProtocolError("half a close code")
    code = int.from_bytes(payload[:2], "big")
    if not _is_valid_close_code(code):
        raise ProtocolError(f"close code {code} is not allowed")
    try:
        return Close(code, payload[2:].decode())
    except UnicodeDecodeError:
        raise ProtocolError("close reason is not UTF-8", 1007) from None


# Messages and the closing handshake: sections 5.4 to 5.6 and 7
# Events are not frozen, which would double the time that it takes to make one.


@dataclass(slots=True)
class Message:
    """A whole data message: `str` if it was sent as text, `bytes` if as binary."""

    data: str | bytes


@dataclass(slots=True)
class Ping:
    """The peer asks for a Pong with the same payload (section 5.5.2)."""

    payload: bytes


@dataclass(slots=True)
class Pong:
    """The answer to a Ping, or a sign of life that nobody asked for (section 5.5.3)."""

    payload: bytes


@dataclass(slots=True)
class Close:
    """The peer's Close frame; `code` is 1005 when it held none (section 7.1.5)."""

    code: int
    reason: str


Event = Message | Ping | Pong | Close


class Side(Enum):
    """Which end of the connection this is: the client masks, the server does not."""

    CLIENT = "client"
    SERVER = "server"


class State(Enum):
    """How far the closing handshake is.

    For the RFC the last step is the end of the TCP connection, which this file does not see:
    at CLOSED nothing is left to do but that (the server goes first, section 7.1.1).
    """

    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(slots=True)
class _Frame:
    """The frame being received: its header, and how much of its payload is still to come."""

    fin: bool
    opcode: int
    remaining: int
    key: bytes = b""


class Connection:
    """One end of an open WebSocket: bytes read in, events out, and bytes to write.

    Holds at most `max_message_bytes` of an unfinished message, however it is cut into frames.
    """

    def __init__(self, side: Side, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._side = side
        self._max_message_bytes = max_message_bytes
        self._buffer = bytearray()  # fed and not yet parsed
        self._frame: _Frame | None = None
        self._message = bytearray()  # payload of the message's frames so far
        self._message_opcode: int | None = None  # None between messages
        self._unfinished_character = b""  # at the end of a text so far: at most three bytes
        self._receiving = True  # no Close received, and not failed
        self._close_sent = False

    @property
    def state(self) -> State:
        """OPEN, CLOSING once a Close was sent or received, CLOSED after both (section 7.1).

        Failing the connection counts as received: no answer is awaited (section 7.1.7).
        """
        if self._receiving and not self._close_sent:
            return State.OPEN
        return State.CLOSED if self._close_sent and not self._receiving else State.CLOSING

    # Receiving: section 6.2

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes that were read; after the peer's Close or a violation they are ignored."""
        if self._receiving:
            self._buffer += data

    def next_event(self) -> Event | None:
        """Return the next event, or None when more bytes are needed or none will count.

        Raises `ProtocolError` once, after every event that came before the violation; from then
        on nothing is processed (section 7.1.7).
        """
        try:
            while self._receiving and (frame := self._frame or self._parse_header()):
                event = self._receive(frame)
                if frame.remaining:
                    return None
                self._frame = None
                if event is not None:
                    return event
        except ProtocolError:
            self._stop_receiving()
            raise
        return None

    def _parse_header(self) -> _Frame | None:
        """Parse a frame's header once all of it has come, refusing it as early as possible."""
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        first, second = buffer[0], buffer[1]
        self._check_first_bytes(first, second)
        opcode, length = first & 0x0F, second & 0x7F
        key_start = 2
        if length >= 126:
            key_start = 4 if length == 126 else 10
            if len(buffer) < key_start:
                return None
            length = _parse_extended_length(buffer[2:key_start])
        if not opcode & CONTROL and len(self._message) + length > self._max_message_bytes:
            raise ProtocolError(f"message exceeds {self._max_message_bytes} bytes", 1009)
        header_end = key_start + (second >> 7) * 4
        if len(buffer) < header_end:
            return None
        self._frame = _Frame(first >= 0x80, opcode, length, bytes(buffer[key_start:header_end]))
        del buffer[:header_end]
        if opcode in (TEXT, BINARY):
            self._message_opcode = opcode
        return self._frame

    def _check_first_bytes(self, first: int, second: int) -> None:
        """Check what the first two bytes of a frame say (sections 5.1, 5.2, 5.4 and 5.5)."""
        opcode = first & 0x0F
        if first & 0x70:
            raise ProtocolError("reserved bits set and no extension agreed")
        if opcode not in OPCODES:
            raise ProtocolError(f"opcode {opcode} is reserved")
        if (second >= 0x80) != (self._side is Side.SERVER):
            raise ProtocolError("client frames must be masked, server frames must not")
        if opcode & CONTROL:
            if first < 0x80 or second & 0x7F > MAX_CONTROL_BYTES:
                raise ProtocolError("a control frame has at most 125 bytes and no fragments")
        elif (opcode == CONTINUATION) != (self._message_opcode is not None):
            raise ProtocolError("continuation frame out of place or missing")

    def _receive(self, frame: _Frame) -> Event | None:
        if not frame.opcode & CONTROL:
            return self._receive_data(frame)
        if len(self._buffer) < frame.remaining:
            return None
        return self._control_event(frame.opcode, bytes(self._take_payload(frame)))

    def _receive_data(self, frame: _Frame) -> Message | None:
        """Add what has come of a data frame to its message; return the message if it is whole.

        Text is checked as it comes and refused at the first bad byte (section 8.1).
        """
        payload = self._take_payload(frame)
        is_last = frame.fin and not frame.remaining
        is_text = self._message_opcode == TEXT
        if is_last:
            self._message_opcode = None
            if not self._message:  # the whole message at once: nothing to put together
                return Message(_decode_text(payload) if is_text else bytes(payload))
        if is_text:
            self._check_text(payload, is_last)
        self._message += payload
        if not is_last:
            return None
        whole, self._message = self._message, bytearray()
        return Message(whole.decode() if is_text else bytes(whole))

    def _check_text(self, payload: bytes | bytearray, is_last: bool) -> None:
        """Check the next part of a text, which may end within a character unless it is the last.

        The codec forbids surrogates, overlong forms and all beyond U+10FFFF (RFC 3629 section 3),
        and finds also in an unfinished character what no continuation can repair, but for one.
        """
        encoded = self._unfinished_character + payload if self._unfinished_character else payload
        try:
            _, checked = codecs.utf_8_decode(encoded, "strict", is_last)
        except UnicodeDecodeError:
            raise ProtocolError("text is not UTF-8", 1007) from None
        unfinished = bytes(encoded[checked:])
        # Two bytes of a surrogate: the codec waits for the third, to serve "surrogatepass".
        if b"\xed\xa0" <= unfinished < b"\xee":
            raise ProtocolError("text is not UTF-8", 1007)
        self._unfinished_character = unfinished

    def _take_payload(self, frame: _Frame) -> bytes | bytearray:
        """Remove and unmask what has come of the frame's payload."""
        payload, key = self._buffer[: frame.remaining], frame.key
        del self._buffer[: frame.remaining]
        frame.remaining -= len(payload)
        if not key:
            return payload
        if frame.remaining:
            turn = len(payload) % 4  # the payload's next byte meets this byte of the key
            frame.key = key[turn:] + key[:turn]
        return apply_mask(payload, key)

    def _control_event(self, opcode: int, payload: bytes) -> Event:
        if opcode == PING:
            return Ping(payload)
        if opcode == PONG:
            return Pong(payload)
        event = _parse_close_payload(payload)
        self._stop_receiving()
        return event

    def _stop_receiving(self) -> None:
        """Let go of all that was received: nothing after a Close counts (section 5.5.1)."""
        self._receiving = False
        self._buffer.clear()
        self._message = bytearray()

    # Sending: section 6.1

    def message(self, data: str | bytes) -> bytes:
        """Return a text message for `str`, a binary one for `bytes`, in one frame.

        Raises RuntimeError after `close` (section 5.5.1), ValueError for a lone surrogate.
        """
        if self._close_sent:
            raise RuntimeError("no data may follow a Close frame")
        if isinstance(data, str):
            return encode_frame(TEXT, data.encode(), mask=self._new_mask())
        return encode_frame(BINARY, data, mask=self._new_mask())

    def ping(self, payload: bytes = b"") -> bytes:
        """Return a Ping of at most 125 bytes; RuntimeError once CLOSED (section 5.5.2)."""
        return self._encode(PING, payload)

    def pong(self, payload: bytes = b"") -> bytes:
        """Return a Pong, due for each `Ping` even after `close`; RuntimeError once CLOSED."""
        return self._encode(PONG, payload)

    def close(self, code: int = 1000, reason: str = "") -> bytes:
        """Return the Close frame that starts or completes the closing handshake (section 7.1.2).

        b"" when one was sent before: each side sends one. 1005 sends an empty payload, so that
        `close(event.code)` echoes any Close received; the other codes that must not be sent are
        a ValueError. A reason beyond 123 bytes is cut at a character boundary.
        """
        payload = _encode_close_payload(code, reason)
        if self._close_sent:
            return b""
        frame = self._encode(CLOSE, payload)
        self._close_sent = True
        return frame

    def _encode(self, opcode: int, payload: bytes) -> bytes:
        if self.state is State.CLOSED:
            raise RuntimeError("the closing handshake is complete")
        return encode_frame(opcode, payload, mask=self._new_mask())

    def _new_mask(self) -> bytes | None:
        # Section 5.3: a fresh, unpredictable key for every frame, against attacks on proxies.
        return secrets.token_bytes(4) if self._side is Side.CLIENT else None

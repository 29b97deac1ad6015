"""What a request, a piece, an end and an error look like on the wire.

The server makes one reply; a dialect is how it is asked for and how it is told: one object per
API, with the methods of `Dialect` below. The native one comes in four forms, chosen by the route
and the request's `events` field. For the reply "Two":

    plain    data: {"text": "Two"}          ... data: [DONE]
    named    event: token                   ... event: done
             data: {"text": "Two"}              data: {"finish_reason": ...}
    bare     data: "Two"                    ... data: [DONE]
    socket   {"text": "Two"}                ... {"done": true, ...}     (WebSocket messages)

With `usage` asked for, plain and bare send one more event before `[DONE]`. An error is
`event: error` and nothing after it, so it can't be taken for an end. A stream is told by an
`Events`, whose four methods return what to write: `begin`, `piece`, `end`, `error`.

The providers' dialects say the same in more words, each in a file of its own:

             completions.py       legacy.py          responses.py             messages.py
    asked    messages             prompt             input, instructions      messages, system
    begin    delta.role           -                  response.created,        message_start,
                                                     ... content_part.added   content_block_start
    "Two"    delta.content        text               response.                content_block_delta
                                                     output_text.delta
    a call   delta.tool_calls     -                  response.function_       content_block_delta,
                                                     call_arguments.delta     input_json_delta
    end      finish_reason,       finish_reason,     ... output_text.done,    content_block_stop,
             usage, [DONE]        usage, [DONE]      response.completed       message_delta, _stop
    why      stop, length,        stop, length,      completed; incomplete    end_turn, tool_use,
             tool_calls           content_filter     and its reason           max_tokens ...
    error    data: {"error"}      data: {"error"}    event: error             event: error
    silence  a comment            a comment          a comment                event: ping
    refusal  {"error": {}}        {"error": {}}      {"error": {}}            {"type": "error", ...}

Each file begins with its bytes, as this one ends with the native ones: line by line, but for the
empty line after each event, when the model says "Two" and is done; or, from the word on, when it
fails after that. What is left out (`...`) is null or of no weight here, or the same in all events
of a reply: its id, its model.

POST /stream
        data: {"text": "Two"}
        data: [DONE]
    or  event: error
        data: {"message": "the model failed", "type": "model_error"}
GET /ws
        {"text": "Two"}
        {"done": true, "id": ..., "finish_reason": "stop", "usage": {...}, "timings": {...}}
    or  {"error": {"message": "the model failed", "type": "model_error"}}

JSON is UTF-8, with the default separators. U+0085, U+2028 and U+2029 are escaped: they may stand
in JSON strings, but many clients split lines on them.

Not here: when to send what (`telling.py`). Read next: `pieces.py`.
"""

import json
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring
from typing import Any, Protocol

import sse
from asks import STAND_IN, Ask, parse_native
from generation import Generation

_LINE_ENDS_ELSEWHERE = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})

_encode = json.JSONEncoder(ensure_ascii=False).encode  # `json.dumps` would make one each time


def to_json(value: object) -> str:
    """Encode as JSON that every line-based client keeps in one piece."""
    text = _encode(value)
    return text if text.isascii() else text.translate(_LINE_ENDS_ELSEWHERE)


def _text_object(text: str) -> str:
    """`{"text": text}`, the one object that is written for each token."""
    quoted = encode_basestring(text)  # what the encoder ends in, for a string
    if not quoted.isascii():
        quoted = quoted.translate(_LINE_ENDS_ELSEWHERE)
    return f'{{"text": {quoted}}}'


class Dialect(Protocol):
    """One API: how its replies are asked for, streamed, told whole, and refused.

    `filter_is_an_end`: it has a word for a reply that a filter cut short (`Generation.filtered`),
    so that what came before can be told; else that is an error.
    """

    filter_is_an_end: bool

    def parse(self, body: Mapping[str, Any]) -> Ask:
        """Check a request; `BadRequest` names the field."""

    def events(self, ask: Ask, generation: Generation) -> "Events":
        """What tells one streamed reply."""

    def body(self, ask: Ask, generation: Generation, text: str) -> dict[str, Any]:
        """A whole reply."""

    def refusal(self, status: int, message: str, type: str, field: str | None) -> dict[str, Any]:
        """What is said instead of a reply. `type` is the native one, the most specific word."""


class Events(Protocol):
    """How a streamed reply is written: as bytes, or as the text of a message.

    `id` is the event's id where events are numbered. `heartbeat` is what breaks a silence.
    """

    heartbeat: bytes

    @property
    def unnumbered(self) -> Callable[[str], bytes | str] | None:
        """What makes a piece's event without an id, if it depends on nothing but the text."""

    def begin(self) -> bytes | str:
        """What is written right after the head, before there is a piece; often nothing."""

    def piece(self, text: str, id: str | None = None) -> bytes | str:
        """One piece of text."""

    def end(self, generation: Generation, id: str | None) -> bytes | str:
        """The end of a complete reply."""

    def error(self, message: str, type: str, id: str | None) -> bytes | str:
        """The end of a reply that failed: words, and no end marker."""


def _summary(generation: Generation) -> dict[str, Any]:
    return {
        "finish_reason": generation.finish_reason,
        "usage": generation.usage,
        "timings": generation.timings.as_dict(),
    }


def _plain(text: str, id: str | None = None) -> bytes:
    return sse.encode(_text_object(text), id=id)


def _bare(text: str, id: str | None = None) -> bytes:
    return sse.encode(to_json(text), id=id)


def _named(text: str, id: str | None = None) -> bytes:
    return sse.encode(_text_object(text), event="token", id=id)


class Plain:
    """One unnamed event a piece, and `[DONE]`."""

    heartbeat = sse.encode_comment("")
    unnumbered: Callable[[str], bytes] = staticmethod(_plain)

    def __init__(self, usage: bool = False) -> None:
        self._usage = usage

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def piece(self, text: str, id: str | None = None) -> bytes:
        """`data: {"text": "Two"}`."""
        return _plain(text, id)

    def end(self, generation: Generation, id: str | None = None) -> bytes:
        """The usage if it was asked for, then `[DONE]`.

        Only `[DONE]` has the id: a client that has it has all.
        """
        usage = sse.encode(to_json(_summary(generation))) if self._usage else b""
        return usage + sse.encode("[DONE]", id=id)

    def error(self, message: str, type: str, id: str | None = None) -> bytes:
        """`event: error`."""
        return sse.encode(to_json({"message": message, "type": type}), event="error", id=id)


class Bare(Plain):
    """Each event a JSON string: the fewest bytes."""

    unnumbered = staticmethod(_bare)

    def piece(self, text: str, id: str | None = None) -> bytes:
        """`data: "Two"`."""
        return _bare(text, id)


class Named(Plain):
    """Every event says what it is."""

    unnumbered = staticmethod(_named)

    def piece(self, text: str, id: str | None = None) -> bytes:
        """`event: token`."""
        return _named(text, id)

    def end(self, generation: Generation, id: str | None = None) -> bytes:
        """`event: done`."""
        return sse.encode(to_json(_summary(generation)), event="done", id=id)


FORMS: dict[str, Callable[[bool], Events]] = {"plain": Plain, "named": Named, "bare": Bare}


class Native:
    """The native routes: `/stream` with events, the others with one JSON body.

    `simulation_names` and `stand_in_names`: the fields that the served engine has of its own, and
    those of the stand-in that `"model": "simulated"` asks for.
    """

    filter_is_an_end = False

    def __init__(
        self,
        *,
        stream: bool,
        simulation_names: tuple[str, ...] = (),
        stand_in_names: tuple[str, ...] = (),
    ) -> None:
        self._stream = stream
        self._simulation_names = simulation_names
        self._stand_in_names = stand_in_names

    def parse(self, body: Mapping[str, Any]) -> Ask:
        """Check a request; unknown fields are refused."""
        stand_in = body.get("model") == STAND_IN
        names = self._stand_in_names if stand_in else self._simulation_names
        return parse_native(body, names, stream=self._stream)

    def events(self, ask: Ask, generation: Generation) -> Events:
        """The form of events that the request asks for."""
        return FORMS[ask.events](ask.usage)

    def body(self, ask: Ask, generation: Generation, text: str) -> dict[str, Any]:
        """The text, and how it ended; bare, the text alone."""
        if ask.events == "bare" and not ask.usage:
            return {"text": text}
        summary = _summary(generation)
        del summary["timings"]
        return {"text": text, **summary}

    def refusal(self, status: int, message: str, type: str, field: str | None) -> dict[str, Any]:
        """`{"error": {...}}`."""
        return {"error": {"message": message, "type": type, "field": field}}


class SocketMessages:
    """The native messages of a WebSocket."""

    heartbeat = b""  # a WebSocket has pings
    unnumbered = staticmethod(_text_object)

    def begin(self) -> str:
        """Nothing."""
        return ""

    def piece(self, text: str, id: str | None = None) -> str:
        """`{"text": "Two"}`."""
        return _text_object(text)

    def end(self, generation: Generation, id: str | None = None) -> str:
        """`{"done": true, ...}`."""
        return to_json({"done": True, "id": generation.id, **_summary(generation)})

    def error(self, message: str, type: str, id: str | None = None) -> str:
        """`{"error": {...}}`."""
        return to_json({"error": {"message": message, "type": type}})

    def refusal(self, message: str, type: str, field: str | None) -> str:
        """An error that says which field of the request is wrong."""
        return to_json({"error": {"message": message, "type": type, "field": field}})
